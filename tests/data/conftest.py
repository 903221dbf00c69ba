"""A server on localhost that misbehaves as the web does, and small downloads and shards."""

import io
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image


def picture(number: int, width: int = 24, height: int = 20) -> Image.Image:
    """A picture of its own for each number."""
    pixels = np.random.Generator(np.random.PCG64(number)).integers(0, 255, (height // 4, width // 4, 3), np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.fixture(scope="session")
def bomb() -> bytes:
    """A PNG of some kilobytes that would unpack to 200 million pixels."""
    return encoded(Image.new("1", (20_000, 10_000)))


class Server(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True

    def __init__(self, bomb: bytes) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bomb = bomb
        self.reset()

    def reset(self) -> None:
        self.requests: Counter[str] = Counter()
        self.agents: set[str] = set()
        self.failing = False  # answer 503 to everything
        self.held = 10**9  # pictures from this number on wait until `released`
        self.released = threading.Event()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

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

    def do_GET(self) -> None:
        self.server.requests[self.path] += 1
        self.server.agents.add(self.headers["User-Agent"])
        _, kind, *rest = self.path.split("/")
        if self.server.failing or (kind == "flaky" and self.server.requests[self.path] == 1):
            self.answer(b"", 503)
        elif kind in ("ok", "flaky"):
            number = int(rest[0].split(".")[0])
            if number >= self.server.held:
                self.server.released.wait(60)
            self.answer(encoded(picture(number)))
        elif kind == "status":
            self.answer(b"", int(rest[0]))
        elif kind == "drip":
            self.send_response(200)
            self.end_headers()
            self.drip(b"x")
        elif kind == "drip-headers":
            self.wfile.write(b"HTTP/1.0 200 OK\r\nX-Slow: ")
            self.drip(b"x")
        elif kind == "endless":
            self.send_response(200)
            self.end_headers()
            while True:
                self.wfile.write(bytes(2**16))
        elif kind == "cut":
            self.answer(encoded(picture(0))[:100], Content_Length="5000")
        elif kind == "announced":
            self.answer(b"x", Content_Length=str(10**12))
        elif kind == "html":
            self.answer(b"<html>404</html>", Content_Type="image/jpeg")
        elif kind == "empty":
            self.answer(b"")
        elif kind == "half":
            whole = encoded(picture(0, 240, 200), "JPEG")
            self.answer(whole[: len(whole) // 2])
        elif kind == "bomb":
            self.answer(self.server.bomb)
        elif kind == "wide":
            self.answer(encoded(picture(0, 400, 20)))
        elif kind == "loop":
            self.answer(b"", 302, Location=self.path)
        elif kind == "to-file":
            self.answer(b"", 302, Location="file:///etc/hostname")
        elif kind == "opted-out":
            self.answer(encoded(picture(0)), X_Robots_Tag="noai")
        else:
            self.answer(b"", 404)


@pytest.fixture(scope="session")
def running_server(bomb: bytes) -> Iterator[Server]:
    server = Server(bomb)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def server(running_server: Server) -> Iterator[Server]:
    """The server as if it had just started."""
    running_server.reset()
    yield running_server
    running_server.released.set()


@pytest.fixture(scope="session")
def files_of() -> Callable[[Path], dict[str, bytes]]:
    """Every file's bytes by its name."""

    def read(folder: Path) -> dict[str, bytes]:
        return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}

    return read


COLOURS = ("red", "green", "blue", "black", "white")
THINGS = ("dog", "cat", "house", "tree", "boat", "shoe", "lamp", "book", "hill")


@pytest.fixture
def downloaded(tmp_path: Path) -> Callable[..., Path]:
    """`downloaded(captions=..., group=..., ...)`: a folder as the download stage leaves it, two tars of pictures."""
    from mdc.data.parts import PART_SCHEMA
    from mdc.data.tars import FixedTar

    def make(name: str = "downloaded", captions: list[str | None] | None = None, **columns: list[Any]) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        captions = captions or [f"a {colour} {thing}" for colour in COLOURS for thing in THINGS]
        rows = pd.DataFrame({"uid": [f"u{i:03d}" for i in range(len(captions))], "caption": captions, "status": "ok"})
        rows["label"], rows["group"], rows["sha256"] = "", "", [f"hash{i}" for i in range(len(rows))]
        for column, values in columns.items():
            rows[column] = values
        half = -(-len(rows) // 2)
        for part, start in enumerate(range(0, len(rows), half)):
            some = rows.iloc[start : start + half]
            with (folder / f"{part:05d}.tar").open("wb") as file:
                tar = FixedTar(file)
                for index, row in some.iterrows():
                    if row["status"] == "ok":
                        tar.add(f"{row['uid']}.jpg", encoded(picture(int(str(index)), 16, 16), "JPEG", quality=95))
                tar.close()
            missing = [name for name in PART_SCHEMA.names if name not in some]
            some.assign(**dict.fromkeys(missing)).to_parquet(
                folder / f"{part:05d}.parquet", index=False, schema=PART_SCHEMA
            )
        (folder / "manifest.json").write_text(json.dumps({"inputs": {}, "counts": {}, "files": {}}))
        return folder

    return make


@pytest.fixture
def shards(tmp_path: Path, downloaded: Callable[..., Path]) -> Callable[..., Path]:
    """`shards(**options of downloaded)`: a folder as the shard stage leaves it, eight samples a shard."""
    from mdc.config import CaptionParams, ShardParams
    from mdc.data.captions import prepare_captions
    from mdc.data.packing import write_shards

    def make(**options: Any) -> Path:
        source = downloaded(**options)
        prepare_captions(
            CaptionParams(vocab_size=100, validation_share=0.2, test_share=0.2), source, tmp_path / "captions"
        )
        write_shards(ShardParams(samples_per_shard=8), source, tmp_path / "captions", tmp_path / "shards")
        return tmp_path / "shards"

    return make
