"""An HTTP server on this machine with range requests that can be made to fail."""

import http.server
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class FlakyServer(http.server.ThreadingHTTPServer):
    """Serves a directory over HTTP.

    Args:
        failure: how the next `num_failures` GET requests with a body of more than `good_bytes` go wrong: "cut" closes
            the connection after that many bytes, "short" sends no more as if the range ended there, "error" answers
            503, "hang" nothing until `released`.
    """

    failure, num_failures, good_bytes, has_ranges, num_bytes_sent = "", 0, 10, True, 0

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root, self.url, self.released = root, f"http://127.0.0.1:{self.server_port}", threading.Event()

    def fail(self, failure: str, num_failures: int, good_bytes: int = 10) -> None:
        self.failure, self.num_failures, self.good_bytes = failure, num_failures, good_bytes


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FlakyServer

    def do_GET(self) -> None:
        server, path = self.server, self.server.root / self.path.lstrip("/")
        if not path.is_file():
            return self.send_error(404)
        content = path.read_bytes()
        start, stop = 0, len(content)
        is_range = server.has_ranges and (wanted := re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")))
        if is_range:
            start, stop = int(wanted[1]), min(int(wanted[2] or len(content)) + 1, len(content))
        failure = ""
        if self.command == "GET" and server.num_failures and stop - start > server.good_bytes:
            server.num_failures -= 1
            failure = server.failure
        if failure == "hang":
            server.released.wait()
        if failure == "error":
            return self.send_error(503)
        if failure == "short":
            stop = start + server.good_bytes
        self.send_response(206 if is_range else 200)
        if server.has_ranges:
            self.send_header("Accept-Ranges", "bytes")
        if is_range:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[start : start + server.good_bytes if failure == "cut" else stop])
            server.num_bytes_sent += stop - start
            self.close_connection = failure == "cut"
        return None

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serve_http(root: Path) -> Iterator[FlakyServer]:
    with FlakyServer(root) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
