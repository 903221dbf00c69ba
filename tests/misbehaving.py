"""A server on localhost that serves real pictures and misbehaves as the web does.

What a path gets (N is a number; every number has a picture of its own):
/ok/N.png a picture; /flaky/N 503 and then the picture; /busy/N 429 with `Retry-After: 1` and then the picture;
/closed/N always 429 with `Retry-After: 3600`; /status/CODE that code; /drip and /drip-headers a byte now and then;
/endless and /endless-redirection bytes without end; /announced a huge Content-Length; /cut and /longer one that is too
large and too small; /reset a connection that is reset in mid-body; /chunks a chunked body without its end; /html a page
as JPEG; /empty nothing; /half a truncated JPEG; /bomb few bytes and many pixels; /wide and /tiny pictures of bad sizes;
/loop a redirection to itself; /to-file one to a file: URL; /to/PATH one to PATH at the other name of this host;
/opted-out/WORD `X-Robots-Tag: WORD`; anything else 404. /robots.txt is `robots`, or 404 where that is None.
"""

import io
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from PIL import Image


def picture(number: int, width: int = 24, height: int = 20) -> Image.Image:
    """A picture of its own for each number."""
    pixels = np.random.Generator(np.random.PCG64(number)).integers(0, 255, (height // 4, width // 4, 3), np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@cache
def bomb() -> bytes:
    """A PNG of some kilobytes that would unpack to 200 million pixels."""
    return encoded(Image.new("1", (20_000, 10_000)))


@cache
def half_a_picture() -> bytes:
    whole = encoded(picture(0, 240, 200), "JPEG")
    return whole[: len(whole) // 2]


class Server(ThreadingHTTPServer):
    request_queue_size = 512
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()
        bomb()  # takes longer to make than a client waits
        self.reset()

    def reset(self) -> None:
        self.requests: Counter[str] = Counter()
        self.robots_requests: Counter[str] = Counter()  # by host
        self.agents: set[str] = set()
        self.robots: str | None = None
        self.failing = False  # answer 503 to everything
        self.failing_paths: set[str] = set()  # or to these
        self.held: set[str] = set()  # pictures at these paths wait until `released`
        self.released = threading.Event()
        self.seconds = 0.0  # that a picture takes
        self.active: Counter[str] = Counter()  # pictures being made, by host
        self.most_active: Counter[str] = Counter()
        self.times: dict[str, list[float]] = {}  # when each path was asked for

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def other_address(self) -> str:
        """The same server under a name that makes it another host to a client."""
        return f"http://localhost:{self.server_port}"

    def handle_error(self, *_: Any) -> None:
        """Clients that hang up are what is being tested."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, body: bytes, code: int = 200, **headers: str) -> None:
        self.send_response(code)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def drip(self, data: bytes) -> None:
        for _ in range(600):
            self.wfile.write(data)
            self.wfile.flush()
            time.sleep(0.1)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Ends before the answer does: after that a client may ask for more."""
        server, host = self.server, str(self.headers["Host"])
        with server.lock:
            server.active[host] += 1
            server.most_active[host] = max(server.most_active[host], server.active[host])
        try:
            yield
        finally:
            with server.lock:
                server.active[host] -= 1

    def do_GET(self) -> None:
        if self.path == "/robots.txt":
            self.server.robots_requests[str(self.headers["Host"])] += 1
            robots = self.server.robots
            self.answer(b"", 404) if robots is None else self.answer(robots.encode())
            return
        with self.server.lock:
            self.server.requests[self.path] += 1
            self.server.times.setdefault(self.path, []).append(time.monotonic())
            self.server.agents.add(self.headers["User-Agent"])
        self.respond(*self.path.partition("?")[0].strip("/").split("/"))

    def respond(self, kind: str, *rest: str) -> None:
        first = self.server.requests[self.path] == 1
        if self.server.failing or self.path in self.server.failing_paths or (kind == "flaky" and first):
            self.answer(b"", 503)
        elif kind == "closed" or (kind == "busy" and first):
            self.answer(b"", 429, Retry_After="1" if kind == "busy" else "3600")
        elif kind in ("ok", "flaky", "busy"):
            with self.at_work():
                if self.path in self.server.held:
                    self.server.released.wait(60)
                time.sleep(self.server.seconds)
            self.answer(encoded(picture(int(rest[0].split(".")[0]))))
        elif kind == "status":
            self.answer(b"", int(rest[0]))
        elif kind == "to":
            self.answer(b"", 302, Location=f"{self.server.other_address}/{'/'.join(rest)}")
        elif kind == "opted-out":
            self.answer(encoded(picture(0)), X_Robots_Tag=rest[0].replace("%20", " "))
        elif kind in BODIES:
            self.answer(BODIES[kind]())
        elif hasattr(self, f"do_{kind.replace('-', '_')}"):
            getattr(self, f"do_{kind.replace('-', '_')}")()
        else:
            self.answer(b"", 404)

    def do_drip(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.drip(b"x")

    def do_drip_headers(self) -> None:
        self.wfile.write(b"HTTP/1.0 200 OK\r\nX-Slow: ")
        self.drip(b"x")

    def do_endless(self) -> None:
        self.send_response(200)
        self.end_headers()
        while True:
            self.wfile.write(bytes(2**16))

    def do_endless_redirection(self) -> None:
        self.send_response(302)
        self.send_header("Location", "/ok/0")
        self.end_headers()
        while True:
            self.wfile.write(bytes(2**16))

    def do_announced(self) -> None:
        self.answer(b"x", Content_Length=str(10**12))

    def do_cut(self) -> None:
        self.answer(encoded(picture(0))[:100], Content_Length="5000")

    def do_longer(self) -> None:
        self.answer(encoded(picture(0)), Content_Length="100")

    def do_reset(self) -> None:
        self.answer(encoded(picture(0))[:100], Content_Length="5000")
        self.wfile.flush()
        time.sleep(0.05)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def do_chunks(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
        self.wfile.write(b"64\r\n" + encoded(picture(0))[:50])

    def do_html(self) -> None:
        self.answer(b"<html>404</html>", Content_Type="image/jpeg")

    def do_loop(self) -> None:
        self.answer(b"", 302, Location=self.path)

    def do_to_file(self) -> None:
        self.answer(b"", 302, Location="file:///etc/hostname")


BODIES = {
    "empty": lambda: b"",
    "half": half_a_picture,
    "bomb": bomb,
    "wide": lambda: encoded(picture(0, 400, 20)),
    "tiny": lambda: encoded(Image.new("RGB", (1, 1))),
}


@contextmanager
def serving() -> Iterator[Server]:
    """The server, running until the end of the block."""
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        thread.join()
        server.server_close()
