"""Minutes of what a week of downloads meets: many bad hosts, kills at random moments, and a cluster."""

import contextlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import psutil
import pytest
from misbehaving import Server, serving

from mdc.config import ComputeParams, DownloadParams
from mdc.data.download import download, read_metadata
from mdc.errors import UserError
from mdc.files import read_json

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

RUN = """
import sys
from pathlib import Path
from mdc.config import ComputeParams, DownloadParams
from mdc.data.download import download
params, compute = DownloadParams.model_validate_json(sys.argv[1]), ComputeParams.model_validate_json(sys.argv[2])
download(params, compute, Path(sys.argv[3]), Path(sys.argv[4]), progress=False)
"""

# of every hundred URLs, those at these places; the others are pictures
BAD = {
    1: ("status/404", "failed:http_404"),
    2: ("html", "failed:decode"),
    3: ("half", "failed:truncated"),
    4: ("cut", "failed:incomplete"),
    5: ("reset", "failed:connection"),
    6: ("chunks", "failed:incomplete"),
    7: ("loop", "failed:redirects"),
    8: ("opted-out/noai", "failed:opted_out"),
    9: ("private", "failed:robots"),
    10: ("longer", "failed:truncated"),
    11: ("wide", "failed:aspect_ratio"),
    12: ("empty", "failed:decode"),
    13: ("status/503", "failed:http_503"),
    14: ("flaky", "ok"),
    15: ("announced", "failed:too_large"),
}
RARE = {  # of every two thousand
    100: ("drip", "failed:timeout"),
    200: ("endless", "failed:too_large"),
    300: ("bomb", "failed:too_many_pixels"),
    400: ("tiny", "failed:too_small"),
    500: ("drip-headers", "failed:timeout"),
}


def soaked(server: Server, waiting: Server, closed: Server, rows: int) -> pd.DataFrame:
    """URLs with what must become of them; those of a second and a third server ask to be waited for."""
    table = []
    for i in range(rows):
        path, status = RARE.get(i % 2000) or BAD.get(i % 100) or ("ok", "ok")
        address = server.address
        if i % 1000 == 50:
            address, path = waiting.address, "busy"
        elif i % 1000 == 150:
            address, path, status = closed.address, "closed", "http_429 or retry_after"
        numbered = path in ("ok", "flaky", "busy", "private", "closed")
        table.append((f"{address}/{path}{'/' if numbered else '?'}{i}", f"caption {i}", status))
    return pd.DataFrame(table, columns=["url", "caption", "expected"])


def test_twenty_thousand_rows_come_to_an_end_each(tmp_path: Path) -> None:
    with serving() as server, serving() as waiting, serving() as closed:
        server.robots = "User-agent: *\nDisallow: /private\n"
        rows = soaked(server, waiting, closed, 20_000)
        joined = rows[rows["expected"] == "ok"].head(300).assign(caption="another", expected="joined")
        again = rows[rows["expected"] == "ok"].tail(200).assign(expected="dropped:duplicate")
        missing = rows.head(100).assign(caption=None, expected="dropped:missing_caption")
        every = pd.concat([rows, joined, again, missing]).sample(frac=1, random_state=0)
        every.drop(columns="expected").to_csv(tmp_path / "list.csv.gz", index=False)
        params = DownloadParams(
            input=str(tmp_path / "list.csv.gz"),
            image_size=8,
            timeout=2.0,
            deadline=4.0,
            max_bytes=10**6,
            per_host=64,
            longest_wait=120.0,
        )
        compute = ComputeParams(download_processes=2, download_threads=32)
        download(params, compute, tmp_path / "work", tmp_path / "out", progress=False)
        found = read_metadata(tmp_path / "out").to_pandas()
        # a try and another one; no URL again for a second row
        assert max(count for path, count in server.requests.items() if "loop" not in path) == 2
        assert not any("private" in path for path in server.requests)

    assert len(found) == len(every) == 20_600
    counts = read_json(tmp_path / "out" / "manifest.json")["counts"]
    assert counts["reasons"] == dict(found["status"].value_counts().sort_index())
    assert sum(counts["reasons"].values()) == counts["rows"] == 20_600
    asked = found[~found["status"].str.startswith(("dropped", "joined"))].set_index("url")["status"]
    expected = rows.set_index("url")["expected"]
    assert set(asked.index) == set(expected.index)
    assert {url: status for url, status in asked.items() if status.split(":")[-1] not in expected[url]} == {}
    others = Counter(found.loc[found["status"].str.startswith(("dropped", "joined")), "status"])
    assert others == Counter(pd.concat([joined, again, missing])["expected"])


def finished(params: DownloadParams, folder: Path) -> Path:
    download(params, ComputeParams(download_threads=8), folder / "work", folder / "out", progress=False)
    return folder / "out"


def pictures(path: Path, server: Server, count: int) -> DownloadParams:
    urls = [f"{server.address}/ok/{i}" for i in range(count)]
    pd.DataFrame({"url": urls, "caption": [f"caption {i}" for i in range(count)]}).to_parquet(path)
    return DownloadParams(input=str(path), samples_per_shard=10, image_size=8)


def is_under_way(parts: Path, since: float) -> bool:
    """Whether a worker has begun a part."""
    with contextlib.suppress(FileNotFoundError):
        return any(file.stat().st_mtime > since for file in parts.glob("*.progress"))
    return False


def test_twenty_kills_at_random_moments_change_nothing(
    tmp_path: Path, server: Server, files_of: Callable[[Path], dict[str, bytes]]
) -> None:
    params = pictures(tmp_path / "list.parquet", server, 300)
    whole = files_of(finished(params, tmp_path / "undisturbed"))
    draw, kills = random.Random(0), 0
    work, output = tmp_path / "work", tmp_path / "out"
    command = [sys.executable, "-c", RUN, params.model_dump_json(), ComputeParams(download_threads=8).model_dump_json()]
    while kills < 20:
        start, waits = time.time(), draw.random() < 0.8  # most kills come while it downloads, some before
        process = subprocess.Popen([*command, str(work), str(output)])
        while waits and not is_under_way(work / "parts", start) and process.poll() is None:
            time.sleep(0.05)
        time.sleep(draw.uniform(0, 3))
        if process.poll() is None:
            children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGKILL)
            psutil.wait_procs(children, timeout=20)
            kills += 1
        else:
            assert files_of(output) == whole
            shutil.rmtree(output)
        process.wait()
    assert files_of(finished(params, tmp_path)) == whole


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "small", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_is_named_and_nothing_is_lost_by_it(
    tmp_path: Path, server: Server, small_disk: Path, files_of: Callable[[Path], dict[str, bytes]]
) -> None:
    params = pictures(tmp_path / "list.parquet", server, 40).model_copy(
        update={"image_size": 256, "image_format": "png"}
    )
    whole = files_of(finished(params, tmp_path / "undisturbed"))
    with pytest.raises(UserError, match="the disk is full"):
        finished(params, small_disk)
    assert not (small_disk / "out").exists()
    server.reset()
    subprocess.run(["mount", "-o", "remount,size=50m", str(small_disk)], check=True)
    assert files_of(finished(params, small_disk)) == whole
    assert 0 < server.requests.total() < 40


@contextlib.contextmanager
def ray_node(*options: str) -> Iterator[int]:
    """A node that `ray start` starts; yields its process id."""
    command = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-cpus=1", *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as node:
        try:
            yield node.pid
        finally:
            below = psutil.Process(node.pid).children(recursive=True)
            node.terminate()
            for process in psutil.wait_procs(below, timeout=20)[1]:
                process.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_downloading(node: int) -> bool:
    return any("ray_download" in process.name() for process in psutil.Process(node).children(recursive=True))


def test_a_ray_cluster_of_two_nodes_gives_the_same(
    tmp_path: Path, server: Server, files_of: Callable[[Path], dict[str, bytes]]
) -> None:
    pytest.importorskip("ray")
    params = pictures(tmp_path / "list.parquet", server, 200)
    whole = files_of(finished(params, tmp_path / "undisturbed"))
    server.seconds = 0.1
    port = free_port()
    address = f"127.0.0.1:{port}"
    compute = ComputeParams(distributor="ray", ray_address=address, download_threads=8).model_dump_json()
    command = [sys.executable, "-c", RUN, params.model_dump_json(), compute, f"{tmp_path}/work", f"{tmp_path}/out"]
    place = tempfile.TemporaryDirectory(dir="/tmp", prefix="ray-")  # sockets need a short path
    options = [f"--temp-dir={place.name}", "--include-dashboard=false", "--node-ip-address=127.0.0.1"]
    with place, ray_node("--head", f"--port={port}", *options) as head:
        while socket.socket().connect_ex(("127.0.0.1", port)):
            time.sleep(0.2)
        with ray_node(f"--address={address}") as other:
            used: set[int] = set()
            with subprocess.Popen(command) as process:
                while process.poll() is None:
                    used |= {node for node in (head, other) if is_downloading(node)}
                    time.sleep(0.1)
            assert process.returncode == 0
    assert used == {head, other}
    assert files_of(tmp_path / "out") == whole
