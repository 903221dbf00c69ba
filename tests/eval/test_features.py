import multiprocessing
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from mdc.api import load
from mdc.config import Params
from mdc.data.loader import ShardDataset
from mdc.data.transforms import eval_images
from mdc.errors import Terminated, TrainingFailed, UserError
from mdc.eval import features as features_module
from mdc.eval.features import Viewer, extract_features, read_features
from mdc.files import read_json, write_manifest
from mdc.stages import run_stage
from mdc.train.checkpoint import load_model


def test_one_row_per_sample_in_one_order(features: Path, shards: Path) -> None:
    found = read_features(features)
    rows = found.samples
    expected = pd.read_parquet(shards / "samples.parquet").sort_values(["split", "uid"])
    assert rows["uid"].tolist() == expected["uid"].tolist()
    assert rows["caption"].tolist() == expected["caption"].tolist()
    assert rows["group"].tolist() == expected["group"].tolist()
    assert rows["picture"].nunique() == len(rows)
    for name, width in (("model", 16), ("untrained", 16), ("pixels", 4 * 4 * 3)):
        assert found.arrays[name].shape == (len(rows), width)
        assert found.arrays[name].dtype == np.float16


def test_a_row_is_the_mean_patch_feature_of_its_picture(features: Path, shards: Path, model: Path) -> None:
    found, loaded = read_features(features), load_model(model)
    for split in ("train", "validation", "test"):
        dataset = ShardDataset(shards, split)
        images_BCHW = eval_images(dataset.images(list(range(len(dataset)))), 8)
        expected = loaded.model.encode(images_BCHW).mean(1).numpy()
        row_of = {uid: row for row, uid in enumerate(found.samples["uid"])}
        stored = found.arrays["model"][[row_of[uid] for uid in dataset.uids]]
        np.testing.assert_allclose(stored, expected, atol=2e-3)


def test_the_floor_is_the_same_encoder_with_other_weights(features: Path) -> None:
    found = read_features(features)
    assert not np.allclose(found.arrays["model"], found.arrays["untrained"], atol=0.1)


def extract(params: Params, shards: Path, model: Path, folder: Path) -> dict[str, bytes]:
    """What the stage writes into `folder`, by name; sets are kept beside it."""
    extract_features(params, shards, model, folder.parent / "cache", folder)
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def kept(cache: Path) -> dict[str, Path]:
    """The sets of a cache by name."""
    return {read_json(file)["name"]: file.parent / "rows.npy" for file in cache.glob("*/manifest.json")}


def without_pictures(shards: Path, folder: Path) -> Path:
    """The same shards, whose pictures cannot be read."""
    shutil.copytree(shards, folder)
    for tar in folder.glob("*.tar"):
        tar.unlink()
    return folder


def test_batch_size_does_not_matter_and_bytes_repeat(
    params: Callable[..., Params], shards: Path, model: Path, features: Path, tmp_path: Path
) -> None:
    again = extract(params(), shards, model, tmp_path / "again")
    assert again == {str(file.relative_to(features)): file.read_bytes() for file in features.rglob("*.*")}
    extract(params(extract={"batch_size": 64}), shards, model, tmp_path / "other")
    for name, array in read_features(features).arrays.items():
        np.testing.assert_allclose(array, read_features(tmp_path / "other").arrays[name], atol=2e-3)


def test_without_floors_there_are_none(
    params: Callable[..., Params], shards: Path, model: Path, tmp_path: Path
) -> None:
    extract(params(extract={"floors": False}), shards, model, tmp_path / "out")
    assert set(read_features(tmp_path / "out").arrays) == {"model"}


def test_any_layer(
    params: Callable[..., Params], make_model: Callable[..., Path], shards: Path, tmp_path: Path
) -> None:
    """That of the encoder and of its floor; as `encode` gives it, and not to be mixed up with another one."""
    deep = make_model(tmp_path / "model", shards, depth=2)
    last = extract(params(), shards, deep, tmp_path / "last")
    assert extract(params(extract={"layer": -1}), shards, deep, tmp_path / "named")["model.npy"] == last["model.npy"]
    first = extract(params(extract={"layer": 0}), shards, deep, tmp_path / "first")
    assert extract(params(extract={"layer": -2}), shards, deep, tmp_path / "second")["model.npy"] == first["model.npy"]
    assert first["pixels.npy"] == last["pixels.npy"]
    found, model, dataset = read_features(tmp_path / "first"), load(deep, "cpu"), ShardDataset(shards, "test")
    assert [read_features(tmp_path / run).layer for run in ("first", "last", "named")] == [0, None, None]
    rows = [found.samples["uid"].tolist().index(uid) for uid in dataset.uids]
    for name, encoder in (("model", model), ("untrained", model.untrained(0))):
        expected = encoder.encode(dataset.images(range(len(dataset))), layer=0).numpy()
        np.testing.assert_allclose(found.arrays[name][rows], expected, atol=2e-3)
        assert not np.allclose(expected, encoder.encode(dataset.images(range(len(dataset)))), atol=0.05)
    with pytest.raises(UserError, match=rf"from model {found.fingerprint}, the index .* {found.fingerprint}, block 0;"):
        found.index.search(found.arrays["model"], 1, found.fingerprint)


@pytest.mark.parametrize("layer", [2, -3])
def test_a_layer_that_there_is_not_is_refused_before_the_work(
    params: Callable[..., Params], make_model: Callable[..., Path], shards: Path, tmp_path: Path, layer: int
) -> None:
    deep = make_model(tmp_path / "model", shards, depth=2)
    with pytest.raises(UserError, match=f"extract.layer {layer}: the encoder has blocks 0 to 1, or -2 to -1"):
        extract(params(extract={"layer": layer}), shards, deep, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


# Made once


def test_the_same_weights_transform_and_data_are_read_once(
    params: Callable[..., Params], shards: Path, model: Path, tmp_path: Path
) -> None:
    first = extract(params(), shards, model, tmp_path / "out")
    gone = without_pictures(shards, tmp_path / "shards")
    assert extract(params(), gone, model, tmp_path / "out") == first
    extract(params(extract={"floors": False}), gone, model, tmp_path / "few")
    assert extract(params(), gone, model, tmp_path / "out") == first, "floors come back"
    for other in ({"batch_size": 8}, {"pixel_size": 5}):
        with pytest.raises(UserError, match=r"\.tar is missing"):
            extract(params(extract=other), gone, model, tmp_path / "out")


def test_models_share_their_floors(
    params: Callable[..., Params], make_model: Callable[..., Path], shards: Path, model: Path, tmp_path: Path
) -> None:
    """One in memory and on disk, whatever became of the encoder; the objective does not matter either."""
    extract(params(), shards, model, tmp_path / "one")
    extract(params(), shards, make_model(tmp_path / "model", shards, "siglip", seed=7), tmp_path / "other")
    for name, same in (("model", False), ("untrained", True), ("pixels", True)):
        places = [(tmp_path / run / f"{name}.npy").stat().st_ino for run in ("one", "other")]
        assert (places[0] == places[1]) is same, name
    assert (tmp_path / "one" / "model.npy").stat().st_mode & 0o222 == 0, "what is shared cannot be written"


def test_a_damaged_set_is_made_again(params: Callable[..., Params], shards: Path, model: Path, tmp_path: Path) -> None:
    first = extract(params(), shards, model, tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    file = kept(tmp_path / "cache")["untrained features"]
    file.chmod(0o644)
    file.write_bytes(file.read_bytes()[:-2] + b"\0\0")
    assert extract(params(), shards, model, tmp_path / "out") == first


def test_more_than_the_limit_is_not_kept(
    params: Callable[..., Params], shards: Path, model: Path, features: Path, tmp_path: Path
) -> None:
    extract(params(extract={"batch_size": 8}), shards, model, tmp_path / "before")
    before = kept(tmp_path / "cache")
    small = params(compute={"kept_features_gb": 0.0})
    assert extract(small, shards, model, tmp_path / "out")["model.npy"] == (features / "model.npy").read_bytes()
    assert not any(before[name].exists() for name in ("model features", "untrained features", "pixels"))
    assert len(kept(tmp_path / "cache")) == 4, "what the newest run uses stays"


# Made by several ranks


def as_rank(number: int, world: int, port: int, params: Params, folder: Path) -> None:
    """What torchrun does: the stage itself, as one of `world` processes, in a project folder."""
    os.environ.update(RANK=str(number), WORLD_SIZE=str(world), LOCAL_RANK=str(number))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.chdir(folder)
    try:
        run_stage("extract", params)
    except UserError as error:
        Path(f"{number}.txt").write_text(str(error))
        sys.exit(2)


def by_ranks(world: int, params: Params, shards: Path, model: Path, folder: Path) -> list[int | None]:
    """Exit codes of the ranks that make `folder`/outputs/features."""
    for source, target in ((shards, folder / "data" / "shards"), (model, folder / "outputs" / "model")):
        target.parent.mkdir(parents=True)
        target.symlink_to(source)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=as_rank, args=(rank, world, port, params, folder)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    return [rank.exitcode for rank in ranks]


@pytest.mark.parametrize(("world", "workers"), [(2, 0), (4, 1), (13, 0)])
def test_any_number_of_ranks_writes_the_same_bytes(
    params: Callable[..., Params], shards: Path, model: Path, features: Path, tmp_path: Path, world: int, workers: int
) -> None:
    """11 blocks: some ranks have one less, or none."""
    codes = by_ranks(world, params(compute={"workers": workers}), shards, model, tmp_path)
    assert codes == [0] * world
    made = tmp_path / "outputs" / "features"
    names = {str(file.relative_to(made)) for file in made.rglob("*.*")}
    assert names == {str(file.relative_to(features)) for file in features.rglob("*.*")}
    for name in names:
        assert (made / name).read_bytes() == (features / name).read_bytes(), name
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_diverged_model_is_told_by_every_rank(
    params: Callable[..., Params], make_model: Callable[..., Path], shards: Path, tmp_path: Path
) -> None:
    assert by_ranks(2, params(), shards, diverged(make_model(tmp_path / "model", shards)), tmp_path) == [2, 2]
    first, second = ((tmp_path / f"{rank}.txt").read_text() for rank in range(2))
    assert first == second
    assert "model features of 7 pictures are not finite" in first
    assert not (tmp_path / "outputs" / "features").exists()


FAULTY = """
import os, signal, time
from mdc.eval import features
from mdc.eval.__main__ import main

batch = features.ShardPictures._batch

def faulty(self, number):
    if os.environ["RANK"] == "1" and number > 4:
        if os.environ["FAULT"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if os.environ["FAULT"] == "stop":
            os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(600)
    return batch(self, number)

features.ShardPictures._batch = faulty
main()
"""


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, params: Callable[..., Params]) -> Iterator[Params]:
    """Parameters of two ranks under torchrun, of which one has a fault by the environment's FAULT; both end."""
    (tmp_path / "faulty_rank.py").write_text(FAULTY)
    monkeypatch.setattr(features_module, "TARGET", "faulty_rank")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = set(psutil.Process().children(recursive=True))
    yield params(compute={"processes": 2, "workers": 0})
    assert not set(psutil.Process().children(recursive=True)) - before
    assert not list((tmp_path / "cache").glob("*/")), "nothing half-made stays"


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [("kill", TrainingFailed, r"rank 1 \(process \d+\) was killed by SIGKILL"), ("stop", Terminated, "")],
)
def test_a_fault_of_a_rank_ends_all(
    launched: Params,
    shards: Path,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    error: type[BaseException],
    message: str,
) -> None:
    monkeypatch.setenv("FAULT", fault)
    with pytest.raises(error, match=message or None):
        extract(launched, shards, model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_mistake_of_a_rank_is_told_as_such(
    launched: Params, make_model: Callable[..., Path], shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT", "none")
    with pytest.raises(UserError, match="model features of 7 pictures are not finite"):
        extract(launched, shards, diverged(make_model(tmp_path / "model", shards)), tmp_path / "out")


def test_index_holds_the_rows_and_the_model(features: Path) -> None:
    found = read_features(features)
    uids = found.index.search(found.arrays["model"], 1, found.fingerprint)[1]
    assert uids[:, 0].tolist() == found.samples["uid"].tolist() == found.index.uids
    assert found.index.facts.model == found.fingerprint == read_json(features / "manifest.json")["fingerprint"]


def diverged(model: Path) -> Path:
    """The weights of a training that ended in NaN."""
    weights = load_file(model / "model.safetensors")
    save_file({name: weight * torch.nan for name, weight in weights.items()}, model / "model.safetensors")
    write_manifest(model, {}, {})
    return model


def test_a_diverged_model_writes_nothing(
    params: Callable[..., Params], make_model: Callable[..., Path], shards: Path, tmp_path: Path
) -> None:
    broken = diverged(make_model(tmp_path / "model", shards))
    with pytest.raises(UserError, match=r"model features of 7 pictures are not finite .*: u\d+, u\d+"):
        extract(params(), shards, broken, tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))
    assert not list((tmp_path / "cache").glob("*/"))


def test_a_damaged_model_is_not_used(
    params: Callable[..., Params], make_model: Callable[..., Path], shards: Path, tmp_path: Path
) -> None:
    broken = make_model(tmp_path / "model", shards)
    weights = load_file(broken / "model.safetensors")
    save_file({name: weight + 1 for name, weight in weights.items()}, broken / "model.safetensors")
    with pytest.raises(UserError, match=r"model is damaged: model.safetensors is not what was written"):
        extract(params(), shards, broken, tmp_path / "out")


def test_viewer_reads_pictures_of_any_split(shards: Path, model: Path) -> None:
    loaded, device = load_model(model), torch.device("cpu")
    dataset = ShardDataset(shards, "validation")
    viewer = Viewer(loaded, shards, ("validation", "test"), device)
    expected = loaded.model.encode(eval_images(dataset.images([2, 0]), 8))
    torch.testing.assert_close(viewer.patches([dataset.uids[2], dataset.uids[0]]), expected)
    both = [ShardDataset(shards, split) for split in ("validation", "test")]
    images = torch.cat([d.images(list(range(len(d)))) for d in both])
    torch.testing.assert_close(viewer.mean_patches(5), loaded.model.encode(eval_images(images, 8)).mean(0))
    assert len(viewer) == len(images)
