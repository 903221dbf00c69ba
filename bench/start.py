"""What a rank takes before its first batch, by the number of training pairs: seconds, and memory of its own."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from bench.frame import Growth
from mdc.data.columns import FOLDER, SOURCES, TYPES
from mdc.data.shards import FORMAT, INDEX
from mdc.files import write_json

PAIRS = (100_000, 1_000_000, 10_000_000)
PER_SHARD = 10_000
TOKENS, UID, PICTURE = 20, 16, 40_000  # per pair; the last two in bytes
ROUNDS = 3


def write_listing(folder: Path, pairs: int) -> None:
    """What the shard stage writes, without the pictures: their place is all that a start needs."""
    (folder / FOLDER).mkdir(parents=True)
    numbers = np.arange(pairs)
    columns = {
        "image_offset": numbers % PER_SHARD * PICTURE + 512,
        "image_bytes": np.full(pairs, PICTURE - 2048),
        "caption_end": numbers + 1,
        "source": np.zeros(pairs),
        "token_end": (numbers + 1) * TOKENS,
        "token": np.tile(np.arange(TOKENS, dtype=np.int32), pairs),
        "uid_end": (numbers + 1) * UID,
        "uid": np.full(pairs * UID, ord("u"), np.uint8),
        "share_key": np.random.Generator(np.random.PCG64(0)).integers(0, 2**63 - 1, pairs),
    }
    for name, kind in TYPES.items():
        columns[name].astype(kind, copy=False).tofile(folder / FOLDER / f"{name}.{kind}")
    write_json(folder / FOLDER / SOURCES, [""])
    names = [f"train-{number:05d}.tar" for number in range(pairs // PER_SHARD)]
    records = [{"file": name, "samples": PER_SHARD, "bytes": 0, "sha256": ""} for name in names]
    splits = {"train": records, "validation": [], "test": []}
    write_json(
        folder / INDEX,
        {"format": FORMAT, "version": "bench", "image_format": "jpg", "location": "", "splits": splits},
    )


def start(folder: Path, share: float) -> dict[str, float]:
    """Up to the samples of the first batch, in this process."""
    import psutil

    from mdc.data.loader import ShardDataset, TrainLoader

    def own() -> int:
        memory = psutil.Process().memory_info()
        return memory.rss - memory.shared  # mapped pages are the cache's, and any process may use them

    before, begin = own(), time.perf_counter()
    dataset = ShardDataset(folder, "train", cache_bytes=0, share=share)
    assert dataset.longest == TOKENS
    loader = TrainLoader(dataset, 1024, 0, range(1), 0, block_samples=32)
    loader._samples(np.arange(1024))
    return {"seconds": time.perf_counter() - begin, "MiB": (own() - before) / 2**20}


def measure() -> list[Growth]:
    seconds: dict[str, list[float]] = {}
    memory: dict[str, list[float]] = {}
    for pairs in PAIRS:
        with tempfile.TemporaryDirectory() as name:
            write_listing(Path(name), pairs)
            for share in (1.0, 0.5):
                label = f"{pairs:,} pairs" + (f", a share of {share}" if share < 1 else "")
                for _ in range(ROUNDS):
                    command = [sys.executable, "-m", "bench.start", name, str(share)]
                    figures = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                    seconds.setdefault(label, []).append(figures["seconds"])
                    memory.setdefault(label, []).append(figures["MiB"])
    compared = (
        f"captions of {TOKENS} tokens; from the opening of the shards to the samples of the first batch. Memory is "
        "what the rank does not share with the other processes of its host: the columns are mapped."
    )
    return [
        Growth("start", "a rank before its first batch", "s", seconds, compared),
        Growth("start", "a rank before its first batch", "MiB of its own", memory),
    ]


if __name__ == "__main__":
    print(json.dumps(start(Path(sys.argv[1]), float(sys.argv[2]))))
