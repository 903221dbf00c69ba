"""Shards on S3, by a real server of its API on localhost: written, checked, fetched, and DVC's push and pull."""

import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import s3fs

from mdc.config import Params, ShardParams
from mdc.data import storage
from mdc.data.captions import prepare_captions
from mdc.data.packing import write_shards
from mdc.data.shards import read_index, verify_shards
from mdc.doctor import examine
from mdc.errors import UserError
from mdc.processes import tied

SHARDS = ShardParams(samples_per_shard=8)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of an S3 server that keeps its buckets in memory."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [str(Path(sys.executable).with_name("moto_server")), "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(tied(command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(address, timeout=1)
                break
            except OSError:
                time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty bucket, reached by the usual variables."""
    variables = {"AWS_ENDPOINT_URL": server, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    for name, value in {**variables, "AWS_DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    files = s3fs.S3FileSystem()
    files.mkdir("pairs")
    yield "s3://pairs"
    files.rm("pairs", recursive=True)
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def project(tmp_path: Path, downloaded: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which pairs are downloaded and captioned."""
    source = downloaded()
    folder = tmp_path / "project"
    (folder / "data").mkdir(parents=True)
    source.rename(folder / "data" / "downloaded")
    from mdc.config import CaptionParams

    params = CaptionParams(vocab_size=100, validation_share=0.2, test_share=0.2)
    prepare_captions(params, folder / "data" / "downloaded", folder / "data" / "captions")
    monkeypatch.chdir(folder)
    return folder


def write(params: ShardParams, output: str = "data/shards") -> Path:
    write_shards(params, Path("data/downloaded"), Path("data/captions"), Path(output))
    return Path(output)


def told(folder: str = "shards at") -> list[str]:
    return [str(finding) for finding in examine(Params()) if folder in finding.what]


def test_shards_on_s3(project: Path, bucket: str, files_of: Callable[[Path], dict[str, bytes]]) -> None:
    here = write(SHARDS, "here/shards")
    away = write(SHARDS.model_copy(update={"target": bucket}))
    assert sorted(path.name for path in away.iterdir()) == [
        "columns",
        "index.json",
        "manifest.json",
        "samples.parquet",
        "tokenizer.json",
    ]
    index = read_index(away)
    assert index["version"] == read_index(here)["version"]
    files = s3fs.S3FileSystem()
    tars = {name: data for name, data in files_of(here).items() if name.endswith(".tar")}
    assert {Path(name).name: files.cat_file(name) for name in files.find(bucket)} == tars
    assert told() == [f"ok       shards at {index['location']}: all {len(tars)} are there, in their sizes"]

    with pytest.raises(UserError, match=r"train-00000\.tar is missing\n(.|\n)*Run `mdc data fetch`"):
        verify_shards(away)
    fetched = storage.fetch(away, index, print)
    assert fetched == Path("data/fetched") / index["version"]
    assert files_of(fetched) == tars
    assert verify_shards(away) == verify_shards(here)
    asked: list[str] = []
    (fetched / "test-00000.tar").write_bytes(b"half")
    storage.fetch(away, index, asked.append)
    assert [line.split(",")[0] for line in asked] == ["test-00000.tar"]  # the others are not asked for again

    files.rm(f"{index['location']}/train-00001.tar")
    files.pipe(f"{index['location']}/train-00000.tar", b"short")
    (line,) = told()
    assert line.startswith("PROBLEM")
    assert "train-00000.tar has 5 bytes, not" in line
    assert "train-00001.tar is missing" in line
    shutil.rmtree(fetched)
    with pytest.raises(UserError, match=r"train-00000\.tar is not what was written"):
        storage.fetch(away, index, print)


def test_a_lost_connection_costs_nothing_that_was_stored(
    project: Path,
    bucket: str,
    server: str,
    monkeypatch: pytest.MonkeyPatch,
    files_of: Callable[[Path], dict[str, bytes]],
) -> None:
    params, work = SHARDS.model_copy(update={"target": bucket}), Path("runs/shard")
    write(SHARDS, "here/shards")
    put = storage.Storage.put
    sent: list[str] = []

    def counted(self: storage.Storage, source: Path) -> None:
        if len(sent) == 3:  # from here on the server cannot be reached
            monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
            s3fs.S3FileSystem.clear_instance_cache()
            self = storage.Storage(self.place)
        put(self, source)
        sent.append(source.name)

    monkeypatch.setattr(storage.Storage, "put", counted)
    arguments = (params, Path("data/downloaded"), Path("data/captions"), Path("data/shards"), work)
    with pytest.raises(UserError, match=r"s3://pairs/\w+: .*run again to continue"):
        write_shards(*arguments)
    assert not Path("data/shards").exists()
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    s3fs.S3FileSystem.clear_instance_cache()
    first, sent[:] = sent.copy(), ["", "", "", ""]
    write_shards(*arguments)
    names = [record["file"] for record in storage.records(read_index(Path("data/shards")))]
    assert sorted(first + sent[4:]) == sorted(names)  # each was put once
    files = s3fs.S3FileSystem()
    stored = {Path(name).name: files.cat_file(name) for name in files.find(bucket)}
    assert stored == {name: data for name, data in files_of(Path("here/shards")).items() if name.endswith(".tar")}


@pytest.mark.parametrize(
    ("place", "message"), [("nosuch://bucket", "nosuch"), ("s3://other", "s3://other/.* bucket does not exist")]
)
def test_a_place_that_cannot_be_used_is_named(project: Path, bucket: str, place: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        write(SHARDS.model_copy(update={"target": place}))
    assert not Path("data/shards").exists()


def dvc(*arguments: str) -> str:
    command = [str(Path(sys.executable).with_name("dvc")), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_dvc_pushes_to_s3_and_pulls_from_it(
    project: Path, bucket: str, server: str, files_of: Callable[[Path], dict[str, bytes]]
) -> None:
    write(SHARDS)
    expected = files_of(Path("data/shards"))
    subprocess.run(["git", "init", "-q"], check=True)
    dvc("init", "-q")
    dvc("remote", "add", "-d", "store", f"{bucket}/dvc")
    dvc("remote", "modify", "store", "endpointurl", server)
    Path("dvc.yaml").write_text("stages: {shard: {cmd: 'true', outs: [data/shards]}}\n")
    dvc("commit", "-q", "-f")
    assert told("DVC's") == ["PROBLEM  DVC's remote lacks data/shards/; run `dvc push`"]
    dvc("push", "-q")
    assert told("DVC's") == ["ok       DVC's cache and remote hold what dvc.lock names"]
    shutil.rmtree("data/shards")
    shutil.rmtree(".dvc/cache")
    assert any("DVC's cache lacks data/shards/; run `dvc pull`" in line for line in told("DVC's"))
    dvc("pull", "-q")
    assert files_of(Path("data/shards")) == expected
    assert json.loads(dvc("data", "status", "--json")).get("not_in_cache") is None
