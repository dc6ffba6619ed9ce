"""flowrun top --serve: the page of a run that follows it, from the run's folder alone.

The page asks for /events (Server-Sent Events, WHATWG HTML 9.2): its data, whenever a file of the
run has changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from http.server import ThreadingHTTPServer
from pathlib import Path

from flowrun.engine.errors import FlowrunError
from flowrun.launcher.commands.run_folders.answer import TextHandler
from flowrun.launcher.page.make_page import folders_page, to_html
from flowrun.launcher.recipe.recipe_errors import CommandLineError
from flowrun.launcher.recipe.schema import read_address
from flowrun.launcher.terminal.as_json import to_json

_OF_THIS_HOST = ("127.0.0.1", "localhost", "::1")
_LOOK_S = 1.0
_SHARE = 0.1  # of a core for the data of a page; that of a long run takes seconds


def serve_page(folder: Path, address: str, say: Callable[[str], object]) -> None:
    """Serve the page of a run until Ctrl-C.

    address: a port of this host alone, as the page has no password.  say: is given the page's
    address.  Raises RecipeError for an address that cannot be had.
    """
    where = f"--serve {address}"
    try:
        found = read_address(address)
        if not isinstance(found, tuple) or found[0] not in _OF_THIS_HOST:
            raise ValueError(f"{address} is not a port of this host")
        server = ThreadingHTTPServer(found, _LivePage)
    except (ValueError, OSError) as error:
        raise CommandLineError(
            where, f"no page can be there: {error}.", "Write a port: 8080."
        ) from None
    _LivePage.folder = folder
    with server:
        say(f"http://{found[0]}:{server.server_port}/ follows {folder}; Ctrl-C ends it")
        server.serve_forever()


class _LivePage(TextHandler):
    """It answers a browser.  folder: of the run."""

    folder = Path()
    timeout = 30.0

    def do_GET(self) -> None:
        with suppress(ConnectionError, TimeoutError):  # the browser has left
            if self.path == "/":
                try:
                    page = to_html(folders_page([self.folder]), live=True)
                except FlowrunError as error:  # a run that begins again has no recipe for a moment
                    self.send_text(503, "text/plain", f"{error}\nLoad it again.\n")
                    return
                self.send_text(200, "text/html", page)
            elif self.path == "/events":
                self._send_events()
            else:
                self.send_text(404, "text/plain", "The page is at /.\n")

    def _send_events(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        seen: frozenset[tuple[str, int]] = frozenset()  # the page may be older than its data now
        while True:
            began, before, seen = time.monotonic(), seen, self._list_times()
            sent = b": nothing new\n\n"  # fails where the browser has left
            if seen != before:
                with suppress(FlowrunError):
                    sent = f"data: {to_json(folders_page([self.folder]))}\n\n".encode()
            self.wfile.write(sent)
            time.sleep(max(_LOOK_S, (time.monotonic() - began) / _SHARE))

    def _list_times(self) -> frozenset[tuple[str, int]]:
        """Return the files of the run, and when each was written."""
        found = set()
        for each in self.folder.iterdir():
            with suppress(FileNotFoundError):  # it takes its last name in this moment
                if each.is_file():
                    found.add((each.name, each.stat().st_mtime_ns))
        return frozenset(found)
