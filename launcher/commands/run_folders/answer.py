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
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from flowrun.engine.errors import RecipeError
from flowrun.launcher.commands.run_folders import run_summary
from flowrun.launcher.commands.run_folders.run_summary import RunSummary
from flowrun.launcher.store.run_files import RECIPE
from flowrun.launcher.supervise.hands.lease import FILE as LEASE

_QUIET_S = 60.0  # without a beat of the lease, which has one each 2 s, the launcher is stuck
_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """A run at one moment.

    newest: the last step's line of metrics.jsonl, by tag.  restarts: of its ranks so far.
    """

    summary: RunSummary
    newest: Mapping[str, object]
    validation: Mapping[str, object]
    restarts: int


# name -> (Prometheus' type, what it is, its value; None: not known yet)
METRICS: Mapping[str, tuple[str, str, Callable[[RunFigures], object]]] = {
    "up": ("gauge", "1 while the run is as it should be.", lambda r: int(r.summary.is_well)),
    "steps_done": ("gauge", "Steps that are recorded.", lambda r: r.summary.done),
    "steps_asked": ("gauge", "Steps of the whole run.", lambda r: r.summary.asked or None),
    "last_step_age_seconds": ("gauge", "Since the last line.", lambda r: r.summary.age_s),
    "restarts_total": ("counter", "How often ranks started again.", lambda r: r.restarts),
    "loss": ("gauge", "Of the last step.", lambda r: r.newest.get("loss")),
    "learning_rate": ("gauge", "Of the last step.", lambda r: r.newest.get("lr")),
    "grad_norm": ("gauge", "Of the last step.", lambda r: r.newest.get("grad_norm")),
    "step_seconds": ("gauge", "Of the last step.", lambda r: r.newest.get("step_s")),
    "tokens_per_second": ("gauge", "Or samples.", lambda r: r.newest.get("tokens_per_s")),
    "waited_seconds": ("gauge", "Of a rank in a step.", lambda r: r.newest.get("waited_s")),
    "memory_bytes": ("gauge", "Of the fullest rank.", lambda r: r.newest.get("memory_bytes")),
}


def read_figures(folder: Path) -> RunFigures:
    """Read a run's folder.  Raises RecipeError where it is none."""
    newest, validation = run_summary.read_newest(folder)
    return RunFigures(
        summary=run_summary.summarize(folder),
        newest=newest,
        validation=validation,
        restarts=run_summary.count_restarts(folder),
    )


def show_metrics(figures: RunFigures) -> str:
    """Return the figures in Prometheus' text format."""
    run = f"run={json.dumps(figures.summary.name)}"
    lines = []
    for name, (kind, what, value_of) in METRICS.items():
        lines += [f"# HELP flowrun_{name} {what}", f"# TYPE flowrun_{name} {kind}"]
        value = value_of(figures)
        lines += [] if value is None else [f"flowrun_{name}{{{run}}} {_number(value)}"]
    lines += [
        "# HELP flowrun_validation Of the last evaluation.",
        "# TYPE flowrun_validation gauge",
    ]
    for metric, value in figures.validation.items():
        if isinstance(value, int | float):
            lines.append(
                f"flowrun_validation{{{run},metric={json.dumps(metric)}}} {_number(value)}"
            )
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


class _Questions(BaseHTTPRequestHandler):
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
        body = text.encode()
        with suppress(ConnectionError, TimeoutError):  # who asked has left
            self.send_response(status)
            self.send_header("Content-Type", _TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def _answer(self, path: str) -> tuple[int, str]:
        _Questions.begun |= has_begun(self.folder, self.since)
        if path == "/healthz":
            status, text = find_health(self.folder) if self.begun else (200, "planning")
            return status, f"{text}\n"
        if path == "/metrics":
            return 200, show_metrics(read_figures(self.folder)) if self.begun else ""
        return 404, "There are /metrics and /healthz.\n"

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""


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
