"""Downloading small pictures from a server on this machine: the download stage beside bare img2dataset."""

import contextlib
import io
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image

from bench.frame import Result, in_turn, rates
from mdc.config import ComputeParams, DownloadParams
from mdc.data.download import download, read_metadata

PICTURES = 5_000
SIDE = (160, 120)  # pixels as they are served, about 5 kB
STORED = 64  # pixels of the shorter side
PART, THREADS, PROCESSES = 1_000, 32, 1
ROUNDS = 3
SERVER = """
import sys, time
from pathlib import Path
from mdc.data.download import serve
with serve(Path(sys.argv[1])) as address:
    print(address, flush=True)
    time.sleep(3600)
"""


def write_pictures(folder: Path) -> None:
    """Smooth noise, each picture its own."""
    for number in range(PICTURES):
        coarse = np.random.Generator(np.random.PCG64(number)).integers(0, 255, (8, 10, 3), np.uint8)
        picture = Image.fromarray(coarse).resize(SIDE, Image.Resampling.BICUBIC)
        picture.save(folder / f"{number:05d}.jpg", quality=90)


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The address of a server in a process of its own."""
    with subprocess.Popen([sys.executable, "-c", SERVER, str(folder)], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.terminate()


def ours(place: Path, folder: Path) -> None:
    params = DownloadParams(input=str(place), image_size=STORED, samples_per_shard=PART, retries=0, per_host=0)
    compute = ComputeParams(download_processes=PROCESSES, download_threads=THREADS)
    shutil.rmtree(folder, ignore_errors=True)
    download(params, compute, folder / "work", folder / "out", progress=False)
    assert read_metadata(folder / "out")["status"].to_pylist() == ["ok"] * PICTURES


def theirs(place: Path, folder: Path) -> None:
    import img2dataset

    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        img2dataset.download(
            str(place),
            image_size=STORED,
            resize_mode="keep_ratio",
            encode_quality=95,
            output_folder=str(folder),
            output_format="webdataset",
            input_format="parquet",
            caption_col="caption",
            processes_count=PROCESSES,
            thread_count=THREADS,
            number_sample_per_shard=PART,
            extract_exif=False,
        )
    stored = pd.concat(pd.read_parquet(path) for path in folder.glob("*.parquet"))
    assert stored["status"].tolist() == ["success"] * PICTURES


def measure() -> list[Result]:
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "pictures").mkdir()
        write_pictures(folder / "pictures")
        with serving(folder / "pictures") as address:
            rows = {
                "url": [f"{address}/{number:05d}.jpg" for number in range(PICTURES)],
                "caption": [f"picture {number}" for number in range(PICTURES)],
            }
            place = folder / "list.parquet"
            pd.DataFrame(rows).to_parquet(place)
            taken = in_turn(
                {"ours": lambda: ours(place, folder / "ours"), "theirs": lambda: theirs(place, folder / "theirs")},
                ROUNDS,
                warmup=0,
            )
    return [
        Result(
            row="download",
            work=f"download {PICTURES:,} pictures of {SIDE[0]}x{SIDE[1]} to {STORED} pixels",
            against="img2dataset",
            unit="pictures/s",
            ours=rates(PICTURES, taken["ours"]),
            theirs=rates(PICTURES, taken["theirs"]),
            aim=0.9,
            compared=(
                f"{PROCESSES} process, {THREADS} threads, parts of {PART:,}, JPEG 95, SHA-256 of each; the same server "
                "in a process of its own. Ours plans, heeds robots.txt and opt-outs, decodes whole pictures and writes "
                "checksums; both start their worker processes within the time."
            ),
        )
    ]
