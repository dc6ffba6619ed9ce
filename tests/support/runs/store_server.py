"""A real S3 server (moto's) in a process of its own, and a proxy in front of it that fails."""

import contextlib
import http.client
import itertools
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from s3fs import S3FileSystem

_SERVE = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
FAULTS = ("busy", "cut before", "cut after", "cut inside")
_LEFT_OUT = ("transfer-encoding", "connection", "content-length")


@contextmanager
def s3_server() -> Iterator[int]:
    """Serve S3 at a port of this machine, with the bucket `bucket`."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _SERVE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin and process.stdout
    try:
        port = int(process.stdout.readline())
        request(port, "PUT", "/bucket")
        yield port
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


def request(port: int, method: str, path: str, body: bytes = b"") -> bytes:
    """One request that succeeds."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        content = answer.read()
        assert answer.status < 300, content
        return content
    finally:
        connection.close()


def access(port: int) -> dict[str, str]:
    """What the environment of a client says of the server; clients of this process begin again."""
    S3FileSystem.clear_instance_cache()
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }


class FaultyProxy(ThreadingHTTPServer):
    """Passes requests on; one of every `every` fails, in each way of FAULTS in turn; 0: none.

    holds: a text; a request to put what has it in its name waits until `free` is set; `held`: one
    waits.
    """

    daemon_threads = True

    def __init__(self, server: int, every: int, first: int) -> None:
        super().__init__(("127.0.0.1", 0), _Passing)
        self.behind, self.every = server, every
        self.numbers, self.failed = itertools.count(first), 0
        self.holds, self.held, self.free = "", threading.Event(), threading.Event()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is no news."""

    def fault(self) -> str:
        number = next(self.numbers)
        if not self.every or number % self.every:
            return ""
        self.failed += 1
        return FAULTS[number // self.every % len(FAULTS)]


class _Passing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyProxy

    def _pass(self) -> None:
        body, fault = self._read_body(), self.server.fault()
        if self.command == "PUT" and self.server.holds and self.server.holds in self.path:
            self.server.held.set()
            self.server.free.wait()
        if fault == "busy":
            self.send_response(503)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if fault == "cut before":
            self._cut()
            return
        connection = http.client.HTTPConnection("127.0.0.1", self.server.behind)
        kept = {k: v for k, v in self.headers.items() if k.lower() not in _LEFT_OUT}
        connection.request(self.command, self.path, body, kept)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        if fault == "cut after":
            self._cut()
            return
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in (*_LEFT_OUT, "date", "server"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", length or str(len(content)))
        self.end_headers()
        if fault == "cut inside":
            self.wfile.write(content[: len(content) // 2])
            self._cut()
            return
        self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass

    def _read_body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _cut(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not printed."""


@contextmanager
def faulty_proxy(server: int, every: int = 10, first: int = 1) -> Iterator[FaultyProxy]:
    """A proxy in front of a server, in a thread."""
    with FaultyProxy(server, every, first) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield proxy
        finally:
            proxy.free.set()
            proxy.shutdown()
            thread.join()
