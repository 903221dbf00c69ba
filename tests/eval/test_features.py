from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from mdc.config import Params
from mdc.data.loader import ShardDataset
from mdc.data.transforms import eval_images
from mdc.errors import UserError
from mdc.eval.features import Viewer, as_float16, extract_features, read_features
from mdc.files import read_json, write_manifest
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


def test_batch_size_does_not_matter_and_bytes_repeat(
    params: Callable[..., Params], shards: Path, model: Path, features: Path, tmp_path: Path
) -> None:
    extract_features(params(), shards, model, tmp_path / "again")
    for file in sorted(path for path in features.rglob("*") if path.is_file()):
        name = file.relative_to(features)
        assert file.read_bytes() == (tmp_path / "again" / name).read_bytes(), name
    extract_features(params(extract={"batch_size": 64}), shards, model, tmp_path / "other")
    for name, array in read_features(features).arrays.items():
        np.testing.assert_allclose(array, read_features(tmp_path / "other").arrays[name], atol=2e-3)


def test_without_floors_there_are_none(
    params: Callable[..., Params], shards: Path, model: Path, tmp_path: Path
) -> None:
    extract_features(params(extract={"floors": False}), shards, model, tmp_path / "out")
    assert set(read_features(tmp_path / "out").arrays) == {"model"}


def test_index_holds_the_rows_and_the_model(features: Path) -> None:
    found = read_features(features)
    uids = found.index.search(found.arrays["model"], 1, found.fingerprint)[1]
    assert uids[:, 0].tolist() == found.samples["uid"].tolist() == found.index.uids
    assert found.index.facts.model == found.fingerprint == read_json(features / "manifest.json")["fingerprint"]


def test_features_that_are_not_finite_are_refused_with_their_keys() -> None:
    features_BD = torch.ones(4, 3)
    features_BD[1, 2], features_BD[3, 0] = torch.nan, 1e6
    with pytest.raises(UserError, match=r"model features of 2 samples .*: b, d;"):
        as_float16(features_BD, "model", ["a", "b", "c", "d"])


def test_a_diverged_model_writes_nothing(
    params: Callable[..., Params], make_model: Callable[..., Path], shards: Path, tmp_path: Path
) -> None:
    broken = make_model(tmp_path / "model", shards)
    weights = load_file(broken / "model.safetensors")
    save_file({name: weight * torch.nan for name, weight in weights.items()}, broken / "model.safetensors")
    write_manifest(broken, {}, {})  # as a training that ended like this would
    with pytest.raises(UserError, match="not finite"):
        extract_features(params(), shards, broken, tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def test_a_damaged_model_is_not_used(
    params: Callable[..., Params], make_model: Callable[..., Path], shards: Path, tmp_path: Path
) -> None:
    broken = make_model(tmp_path / "model", shards)
    weights = load_file(broken / "model.safetensors")
    save_file({name: weight + 1 for name, weight in weights.items()}, broken / "model.safetensors")
    with pytest.raises(UserError, match=r"model is damaged: model.safetensors is not what was written"):
        extract_features(params(), shards, broken, tmp_path / "out")


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
