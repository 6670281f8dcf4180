"""Real servers on this machine: HTTP with range requests that can be told to fail, and S3."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aiohttp import web


class FlakyServer:
    """Serves a directory over HTTP with range requests.

    Args:
        failure: how the next `num_failures` GET requests with a body of more than `good_bytes` go wrong: "cut" closes
            the connection after that many bytes, "short" sends no more as if the range ended there, "error" answers
            503.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = ""
        self.failure = ""
        self.num_failures = 0
        self.good_bytes = 0
        self.has_ranges = True
        self.num_bytes_sent = 0

    def fail(self, failure: str, num_failures: int, good_bytes: int = 10) -> None:
        self.failure, self.num_failures, self.good_bytes = failure, num_failures, good_bytes

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path = self.root / request.match_info["path"]
        if not path.is_file():
            raise web.HTTPNotFound
        content = path.read_bytes()
        start, stop, status = 0, len(content), 200
        if self.has_ranges and request.http_range.start is not None:
            start, stop = request.http_range.start, min(request.http_range.stop or len(content), len(content))
            status = 206
        body = content[start:stop]
        headers = {"Accept-Ranges": "bytes"} if self.has_ranges else {}
        fails = request.method == "GET" and self.num_failures and len(body) > self.good_bytes
        if fails:
            self.num_failures -= 1
            if self.failure == "error":
                raise web.HTTPServiceUnavailable
            if self.failure == "short":
                body, stop = body[: self.good_bytes], start + self.good_bytes
        if status == 206:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        response = web.StreamResponse(status=status, headers=headers)
        response.content_length = len(body)
        await response.prepare(request)
        if request.method == "GET":
            cut = fails and self.failure == "cut"
            await response.write(body[: self.good_bytes] if cut else body)
            self.num_bytes_sent += len(body)
            if cut:
                assert request.transport is not None
                request.transport.close()
                return response
        await response.write_eof()
        return response


@contextmanager
def serve_http(root: Path) -> Iterator[FlakyServer]:
    server = FlakyServer(root)
    loop = asyncio.new_event_loop()
    started = threading.Event()

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/{path:.*}", server.answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    runner: web.AppRunner | None = None

    def serve() -> None:
        nonlocal runner
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        started.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
