"""A server on localhost that misbehaves as the web does, and small downloads and shards."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from misbehaving import Server, encoded, picture, serving


@pytest.fixture(scope="session")
def running_server() -> Iterator[Server]:
    with serving() as server:
        yield server


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
