"""A server of a few lines, for the benchmarks that send to one."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


class Handler(BaseHTTPRequestHandler):
    """GET answers with the status that the path names, 200 where it names none; POST serves short bodies alone."""

    def do_GET(self) -> None:
        named = self.path[1:]
        self.answer(int(named) if named.isdecimal() else 200)

    def do_POST(self) -> None:
        self.answer(200 if len(self.rfile.read(int(self.headers.get("Content-Length", 0)))) < 1024 else 429)

    def answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


class Server:
    """As a process of a server looks to a benchmark."""

    log = ""

    def __init__(self) -> None:
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.http.server_port
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.kill()
