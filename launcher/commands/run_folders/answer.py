"""A program that answers questions about a run over HTTP: `python -m …answer FOLDER DESCRIPTOR`.

/metrics is for Prometheus (text format 0.0.4), /healthz for probes: what `flowrun status` says, 200
where its exit status is 0, else 503.  Each answer reads the run's folder.  The program ends at the
end of its standard input, which is its launcher's.
"""

from __future__ import annotations

import json
import math
import select
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from flowrun.engine.errors import RecipeError
from flowrun.launcher.commands.run_folders import run_summary
from flowrun.launcher.store.run_files import RECIPE
from flowrun.launcher.supervise.hands.lease import FILE as LEASE

_QUIET_S = 60.0  # without a beat of the lease, which has one each 2 s, the launcher is stuck
_TYPE = "text/plain; version=0.0.4"
# name -> (Prometheus' type, what it is, its tag in metrics.jsonl; "": other files say it)
METRICS: Mapping[str, tuple[str, str, str]] = {
    "up": ("gauge", "1 while the run is as it should be.", ""),
    "steps_done": ("gauge", "Steps that are recorded.", ""),
    "steps_asked": ("gauge", "Steps of the whole run.", ""),
    "last_step_age_seconds": ("gauge", "Since the last line.", ""),
    "restarts_total": ("counter", "How often ranks started again.", ""),
    "loss": ("gauge", "Of the last step.", "loss"),
    "learning_rate": ("gauge", "Of the last step.", "lr"),
    "grad_norm": ("gauge", "Of the last step.", "grad_norm"),
    "step_seconds": ("gauge", "Of the last step.", "step_s"),
    "tokens_per_second": ("gauge", "Or samples.", "tokens_per_s"),
    "waited_seconds": ("gauge", "Of a rank in a step.", "waited_s"),
    "memory_bytes": ("gauge", "Of the fullest rank.", "memory_bytes"),
    "validation": ("gauge", "Of the last evaluation.", ""),
}


def show_metrics(folder: Path) -> str:
    """Return the figures of a run in Prometheus' text format, those that are known.

    Raises RecipeError where the folder is none of a run.
    """
    summary, (newest, validation) = run_summary.summarize(folder), run_summary.read_newest(folder)
    of_folder = {
        "up": int(summary.is_well),
        "steps_done": summary.done,
        "steps_asked": summary.asked or None,
        "last_step_age_seconds": summary.age_s,
        "restarts_total": run_summary.count_restarts(folder),
    }
    run, lines = f"run={json.dumps(summary.name)}", []
    for name, (kind, what, tag) in METRICS.items():
        lines += [f"# HELP flowrun_{name} {what}", f"# TYPE flowrun_{name} {kind}"]
        value = newest.get(tag) if tag else of_folder.get(name)
        lines += [] if value is None else [f"flowrun_{name}{{{run}}} {_number(value)}"]
    for metric, value in validation.items():
        if isinstance(value, int | float):
            labels = f"{run},metric={json.dumps(metric)}"
            lines.append(f"flowrun_validation{{{labels}}} {_number(value)}")
    return "\n".join(lines) + "\n"


def _number(value: object) -> str:
    number = float(str(value))
    return f"{number:.10g}" if math.isfinite(number) else "NaN"


def has_begun(folder: Path, since: float) -> bool:
    """Return whether the run that plans since then has taken its folder: what is there else is of
    a run before.
    """
    with suppress(OSError):
        return (folder / RECIPE).exists() and (folder / LEASE).stat().st_mtime >= since
    return False


def find_health(folder: Path) -> tuple[int, str]:
    """Return the HTTP status and the text of /healthz, of a run that has begun."""
    summary = run_summary.summarize(folder)
    if summary.status == run_summary.RUNNING:
        with suppress(OSError):
            quiet_s = time.time() - (folder / LEASE).stat().st_mtime
            if quiet_s > _QUIET_S:
                return 503, f"stuck: the launcher has said nothing for {quiet_s:.0f} s"
    return 200 if summary.is_well else 503, str(summary)


class TextHandler(BaseHTTPRequestHandler):
    """It answers with texts."""

    def send_text(self, status: int, kind: str, text: str) -> None:
        """Send a whole answer.  kind: its media type, without its charset."""
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""


class _Questions(TextHandler):
    """It answers a question, within 5 s.  folder: of the run.  since: when its launcher began.
    begun: it has taken the folder.
    """

    folder, since, begun = Path(), 0.0, False
    timeout = 5.0

    def do_GET(self) -> None:
        try:
            status, text = self._answer(self.path.partition("?")[0])
        except (RecipeError, OSError) as error:  # its folder is gone
            status, text = 503, str(error)
        with suppress(ConnectionError, TimeoutError):  # who asked has left
            self.send_text(status, _TYPE, text)

    def _answer(self, path: str) -> tuple[int, str]:
        _Questions.begun |= has_begun(self.folder, self.since)
        if path == "/healthz":
            status, text = find_health(self.folder) if self.begun else (200, "planning")
            return status, f"{text}\n"
        if path == "/metrics":
            return 200, show_metrics(self.folder) if self.begun else ""
        return 404, "There are /metrics and /healthz.\n"


def main(folder: Path, descriptor: int) -> None:
    """Answer until standard input ends.  descriptor: of a socket that listens."""
    _Questions.folder, _Questions.since = folder, time.time()
    server = ThreadingHTTPServer(("", 0), _Questions, bind_and_activate=False)
    server.socket.close()
    server.socket = socket.socket(fileno=descriptor)
    with server:
        while sys.stdin not in (ready := select.select([server, sys.stdin], [], [])[0]):
            if server in ready:
                server.handle_request()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
