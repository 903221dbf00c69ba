"""The download stage against a server that misbehaves: every row accounted for, equal bytes, nothing lost by a kill."""

import errno
import io
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
from typer.testing import CliRunner

from mdc.cli import app
from mdc.config import ComputeParams, DownloadParams, load_params
from mdc.data.download import download, read_metadata, serve
from mdc.data.fetch import FetchFailed, Limits, fetch
from mdc.data.parts import PartWriter
from mdc.data.tars import members
from mdc.data.workers import _watched
from mdc.errors import UserError
from mdc.files import read_json
from mdc.stages import run_stage

FAST = {"timeout": 1.0, "deadline": 2.0, "retries": 0, "max_bytes": 10**6, "image_size": 8}
COMPUTE = ComputeParams(download_threads=8)


def write_list(path: Path, urls: list[str], **columns: list[Any]) -> Path:
    rows = pd.DataFrame({"url": urls, "caption": [f"caption {i}" for i in range(len(urls))]}).assign(**columns)
    rows.to_parquet(path, index=False)
    return path


def test_every_row_is_accounted_for(tmp_path: Path, server: Any) -> None:
    expected = {
        "ok/0.png": "ok",
        "drip": "failed:timeout",
        "endless": "failed:too_large",
        "status/404": "failed:http_404",
        "status/503": "failed:http_503",
        "html": "failed:decode",
        "empty": "failed:decode",
        "half": "failed:truncated",
        "cut": "failed:incomplete",
        "chunks": "failed:incomplete",
        "reset": "failed:connection",
        "longer": "failed:truncated",
        "closed/1": "failed:http_429",
        "private/1": "failed:robots",
        "bomb": "failed:too_many_pixels",
        "wide": "failed:aspect_ratio",
        "tiny": "failed:too_small",
        "opted-out/noai": "failed:opted_out",
        "loop": "failed:redirects",
        "ok/1.png": "ok",
        "ok/2.png": "dropped:missing_caption",
        "": "dropped:no_url",
        "ok/3.png": "dropped:line_break",
        "ok/4.png": "ok",
    }
    server.robots = "User-agent: *\nDisallow: /private\n"
    other = {"closed/1"}  # another host, since this one asks to be left alone afterwards
    urls = [f"{server.other_address if path in other else server.address}/{path}" if path else "" for path in expected]
    captions = [{"ok/2.png": " ", "ok/3.png": "a\nb"}.get(path, f"caption {path}") for path in expected]
    place = write_list(tmp_path / "urls.parquet", urls, caption=captions, kind=[f"kind {path}" for path in expected])
    params = DownloadParams(
        input=str(place), label_column="kind", samples_per_shard=6, min_success_rate=0.1, image_format="png", **FAST
    )
    output = tmp_path / "downloaded"
    download(params, COMPUTE, tmp_path / "work", output, progress=False)

    rows = read_metadata(output).to_pandas().set_index("label")
    assert dict(rows["status"]) == {f"kind {path}": status for path, status in expected.items()}
    counts = read_json(output / "manifest.json")["counts"]
    assert counts["rows"] == len(expected)
    assert counts["ok"] == 3
    assert counts["reasons"] == {status: list(expected.values()).count(status) for status in set(expected.values())}
    assert counts["retryable"] == 6
    for path in ("ok/2.png", "ok/3.png", "private/1"):
        assert f"/{path}" not in server.requests

    found = {member.name for tar in output.glob("*.tar") for member in members(tar)}
    assert found == {f"{uid}.png" for uid in rows.loc[rows["status"] == "ok", "uid"]}
    ok = rows.loc["kind ok/0.png"]
    assert (ok["width"], ok["height"], ok["original_width"], ok["original_height"]) == (10, 8, 24, 20)
    assert ok["mode"] == "RGB"
    assert len(ok["sha256"]) == 64
    assert not (tmp_path / "work").exists()


@pytest.fixture(scope="module")
def forty(tmp_path_factory: pytest.TempPathFactory, running_server: Any) -> DownloadParams:
    """A list of forty pictures in four parts."""
    place = tmp_path_factory.mktemp("list") / "forty.parquet"
    write_list(place, [f"{running_server.address}/ok/{i}.png" for i in range(40)])
    return DownloadParams(input=str(place), samples_per_shard=10, image_size=8, retries=0)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, running_server: Any, forty: DownloadParams) -> Path:
    """What the forty become; before that, a run during which the server failed must not have left anything."""
    folder = tmp_path_factory.mktemp("undisturbed")
    running_server.reset()
    running_server.failing = True
    with pytest.raises(UserError, match=r"none of 40 images could be downloaded \(failed:http_503 40\)"):
        download(forty, COMPUTE, folder / "work", folder / "downloaded", progress=False)
    assert not (folder / "downloaded").exists()
    running_server.failing = False
    download(forty, COMPUTE, folder / "work", folder / "downloaded", progress=False)
    return folder / "downloaded"


def test_what_failed_for_a_passing_reason_is_asked_again(undisturbed: Path) -> None:
    counts = {"rows": 40, "captions_left_out": 0, "ok": 40, "retryable": 0, "reasons": {"ok": 40}}
    assert read_json(undisturbed / "manifest.json")["counts"] == counts
    names = [member.name for member in members(undisturbed / "00000.tar")]
    assert len(names) == 10
    assert names == sorted(names)


def test_a_second_run_asks_only_for_what_may_come_now(
    tmp_path: Path, undisturbed: Path, server: Any, forty: DownloadParams, files_of: Callable
) -> None:
    """Ten of the forty fail for a passing reason in a run that comes to its end."""
    failing = [f"/ok/{i}.png" for i in range(0, 40, 4)]
    output = tmp_path / "downloaded"
    server.failing_paths = set(failing)
    patient = forty.model_copy(update={"min_success_rate": 0.7})
    download(patient, COMPUTE, tmp_path / "work", output, progress=False)
    counts = read_json(output / "manifest.json")["counts"]
    assert (counts["ok"], counts["retryable"], counts["reasons"]["failed:http_503"]) == (30, 10, 10)

    server.reset()
    download(forty, COMPUTE, tmp_path / "work", output, progress=False)
    assert sorted(server.requests) == sorted(failing)
    assert files_of(output) == files_of(undisturbed)

    server.reset()
    download(forty, COMPUTE, tmp_path / "work", output, progress=False)
    assert not server.requests
    assert files_of(output) == files_of(undisturbed)


def test_the_command_that_asks_again(tmp_path: Path, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_list(tmp_path / "urls.parquet", [f"{server.address}/ok/{i}" for i in range(4)])
    text = "download: {input: urls.parquet, retries: 0}\n"
    (tmp_path / "params.yaml").write_text(text)
    with pytest.raises(UserError, match="run `mdc stage download`"):
        CliRunner().invoke(app, ["data", "retry"], catch_exceptions=False)
    server.failing_paths = {"/ok/1", "/ok/2"}
    run_stage("download", load_params())
    server.reset()
    server.failing_paths = {"/ok/2"}
    told = CliRunner().invoke(app, ["data", "retry"], catch_exceptions=False).output
    assert "data/downloaded: asked again for 2, 1 came, 1 may yet come" in told
    assert sorted(server.requests) == ["/ok/1", "/ok/2"]
    (tmp_path / "params.yaml").write_text(text.replace("retries: 0", "image_size: 50"))
    with pytest.raises(UserError, match="with other parameters"):
        CliRunner().invoke(app, ["data", "retry"], catch_exceptions=False)


def test_other_settings_are_another_download(
    tmp_path: Path, undisturbed: Path, server: Any, forty: DownloadParams
) -> None:
    output = tmp_path / "downloaded"
    shutil.copytree(undisturbed, output)
    download(forty.model_copy(update={"image_size": 9}), COMPUTE, tmp_path / "work", output, progress=False)
    assert len(server.requests) == 40
    assert read_metadata(output)["height"].to_pylist() == [9] * 40


def test_each_url_is_asked_for_once_and_keys_do_not_depend_on_parts(tmp_path: Path, server: Any) -> None:
    """Twenty rows: three name one URL, eight others get the same placeholder from their host."""
    urls = [f"{server.address}/ok/1.png"] * 3 + [f"{server.address}/flaky/{i}" for i in range(2, 11)]
    urls += [f"{server.address}/opted-out/nofollow?{i}" for i in range(8)]
    place = write_list(tmp_path / "urls.parquet", urls)
    tables = []
    for size in (4, 1000):
        server.reset()
        params = DownloadParams(input=str(place), samples_per_shard=size, image_size=8, retries=1)
        download(params, COMPUTE, tmp_path / "work", tmp_path / f"downloaded {size}", progress=False)
        assert server.requests == {url.removeprefix(server.address): 2 if "flaky" in url else 1 for url in urls}
        tables.append(read_metadata(tmp_path / f"downloaded {size}").sort_by("uid").to_pandas())
    assert tables[0].equals(tables[1])
    assert dict(tables[0]["status"].value_counts()) == {"ok": 18, "joined": 2}
    assert tables[0]["sha256"].value_counts().max() == 8
    (shared,) = [captions for captions in tables[0]["captions"] if len(captions) == 3]
    assert sorted(caption["text"] for caption in shared) == ["caption 0", "caption 1", "caption 2"]


def test_the_user_agent_is_what_the_parameter_says(tmp_path: Path, server: Any) -> None:
    place = write_list(tmp_path / "urls.parquet", [f"{server.address}/ok/{i}" for i in range(2)])
    agent = "finder/2 (+https://example.org/about; img2dataset)"
    params = DownloadParams(input=str(place), user_agent=agent, image_size=8)
    download(params, COMPUTE, tmp_path / "work", tmp_path / "downloaded", progress=False)
    assert server.agents == {agent}


SCRIPT = """
import sys
from pathlib import Path
from mdc.config import ComputeParams, DownloadParams
from mdc.data.download import download
params = DownloadParams.model_validate_json(sys.argv[1])
download(params, ComputeParams(download_threads=8), Path(sys.argv[2]), Path(sys.argv[3]), progress=False)
"""


def test_a_list_of_many_parts_comes_to_its_end(
    tmp_path: Path, undisturbed: Path, server: Any, forty: DownloadParams
) -> None:
    """A worker is replaced after five parts; the later ones must not end before the pool does."""
    params = forty.model_copy(update={"samples_per_shard": 3}).model_dump_json()
    output = tmp_path / "downloaded"
    subprocess.run([sys.executable, "-c", SCRIPT, params, str(tmp_path / "work"), str(output)], check=True, timeout=90)
    assert read_metadata(output).sort_by("uid").equals(read_metadata(undisturbed).sort_by("uid"))


def test_a_kill_loses_nothing_and_repeats_nothing(
    tmp_path: Path, undisturbed: Path, server: Any, forty: DownloadParams, files_of: Callable
) -> None:
    work, output = tmp_path / "work", tmp_path / "downloaded"
    parts = [
        {url.removeprefix(server.address) for url in pd.read_parquet(undisturbed / f"{part:05d}.parquet")["url"]}
        for part in range(4)
    ]
    server.held = set(sorted(parts[1])[2:])  # the second part cannot finish
    with subprocess.Popen([sys.executable, "-c", SCRIPT, forty.model_dump_json(), str(work), str(output)]) as process:
        while not (work / "parts" / "00000.parquet").exists():
            assert process.poll() is None
            time.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    assert not output.exists()
    first = {name: (work / "parts" / name).stat().st_mtime_ns for name in ("00000.tar", "00000.parquet")}
    (work / "parts" / "00001.tar").write_bytes(b"half a part")
    server.held = set()
    server.released.set()
    before = server.requests.copy()

    with pytest.MonkeyPatch.context() as patch:  # keep the parts, to look at them
        patch.setattr("shutil.rmtree", lambda *_, **__: None)
        download(forty, ComputeParams(download_threads=3, download_processes=2), work, output, progress=False)
    assert {name: (work / "parts" / name).stat().st_mtime_ns for name in first} == first
    again = server.requests - before
    assert set(again) == parts[1] | parts[2] | parts[3]

    assert files_of(output) == files_of(undisturbed)


@pytest.mark.parametrize("moment", ["starting", "working"])
def test_ctrl_c_reaches_the_workers_and_is_left_to_their_parent(
    tmp_path: Path, server: Any, forty: DownloadParams, moment: str
) -> None:
    """A terminal sends it to all of them."""
    command = [sys.executable, "-c", SCRIPT, forty.model_dump_json(), str(tmp_path / "work"), str(tmp_path / "output")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    server.held = {f"/ok/{number}.png" for number in range(40)}
    deadline, workers = time.monotonic() + 60, []
    while not (workers and (moment == "starting" or server.requests)):
        assert time.monotonic() < deadline
        workers = [
            child
            for child in psutil.Process(process.pid).children()
            if "multiprocessing.spawn" in " ".join(child.cmdline())
        ]
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=30)
    server.released.set()
    assert said.count("KeyboardInterrupt") == 1, "that of the script itself"
    assert "Process SpawnPoolWorker" not in said
    assert not psutil.wait_procs(workers, timeout=10)[1]


def test_mistakes_are_found_before_any_request(tmp_path: Path, server: Any) -> None:
    place = write_list(tmp_path / "in.parquet", [f"{server.address}/ok/0.png"] * 2, caption=["", " "])
    for options, message in (
        ({"input": str(place)}, "no row can be asked for"),
        ({"input": str(place), "url_column": "URL"}, "did you mean 'url'"),
        ({"input": str(tmp_path)}, "where the list"),
    ):
        with pytest.raises(UserError, match=message):
            download(DownloadParams(**options), COMPUTE, tmp_path / "work", tmp_path / "out", progress=False)
    assert not server.requests
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense"])
def test_a_cluster_that_is_not_there_is_named(tmp_path: Path, forty: DownloadParams, address: str) -> None:
    pytest.importorskip("ray")
    compute = ComputeParams(distributor="ray", ray_address=address)
    with pytest.raises(UserError, match=f"compute.ray_address '{address}': no Ray cluster answers"):
        download(forty, compute, tmp_path / "work", tmp_path / "out", progress=False)


def test_a_killed_worker_ends_the_run() -> None:
    with get_context("spawn").Pool(1) as pool, pytest.raises(UserError, match="exit code -9"):
        list(_watched(pool.imap_unordered(signal.raise_signal, [signal.SIGKILL])))  # type: ignore[arg-type]


class _FullDisk(io.BytesIO):
    def write(self, _: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_part_that_could_not_be_written_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """img2dataset prints what `write` raises and goes on, so `close` must raise it again."""
    writer = PartWriter(0, str(tmp_path), True, 5, None, "jpg")
    monkeypatch.setattr(writer, "_progress", _FullDisk())
    writer.write(None, "0", "a", {"uid": "a", "error_message": "timeout: no answer"})
    with pytest.raises(OSError, match="No space left"):
        writer.close()
    assert not [*tmp_path.glob("*.tar"), *tmp_path.glob("*.parquet")]


def test_the_local_server_serves_a_folder_and_ends(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(b"picture")
    limits = Limits(timeout=2, deadline=2, retries=0, max_bytes=100, user_agent="test")
    with serve(tmp_path) as address:
        local = replace(limits, sample_server=address)
        assert fetch("sample:///images/a.png", local) == b"picture"
        with pytest.raises(FetchFailed, match="http_404"):
            fetch("sample:///../secret", local)
    with pytest.raises(FetchFailed, match="refused"):
        fetch("sample:///images/a.png", local)
