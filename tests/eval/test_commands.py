"""The commands that measure any checkpoint, as users call them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from labelled_world import COLOURS
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

import mdc
from mdc.cli import app
from mdc.errors import UserError
from mdc.files import read_json


def run(*arguments: str | int | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def crepe(tmp_path: Path) -> Path:
    """Two questions of SugarCrepe's kind, with their picture."""
    Image.new("RGB", (12, 12), "red").save(tmp_path / "a.png")
    entry = {"filename": "a.png", "caption": "red fish", "negative_caption": "blue fish"}
    long = {**entry, "caption": "red fish " * 9}
    (tmp_path / "swap_obj.json").write_text(json.dumps({"0": entry, "2": long}))
    return tmp_path


def test_compositional(crepe: Path, model: Path, tmp_path: Path) -> None:
    places = ("--data", crepe, "--images", crepe, "--model", model, "--draws", 4, "--out", tmp_path / "out")
    done = run("compositional", "swap_obj", *places, "--partial", "--skip-long", "--scorers", "mc,heuristic")
    assert done.exit_code == 0, done.output
    results = read_json(tmp_path / "out" / "results.json")
    assert [(r["scorer"], r["questions"], r["left_out"]) for r in results["sets"]] == [
        ("mc", 1, {"too long": 1}),
        ("heuristic", 1, {"too long": 1}),
    ]
    assert "swap_obj" in done.output
    for arguments, message in (
        ((*places,), "245 were published"),
        ((*places, "--partial"), "longer than the model takes"),
        ((*places, "--partial", "--scorers", "cosine"), "'cosine' does not fit"),
    ):
        assert message in str(refused("compositional", "swap_obj", *arguments))
    assert "did you mean 'swap_obj'" in str(refused("compositional", "swap_objs", *places))


def test_an_index_of_ones_own_pictures(
    model: Path, make_model: Callable[..., Path], shards: Path, tmp_path: Path
) -> None:
    pictures = [tmp_path / f"{colour}.png" for colour in ("red", "green", "blue")]
    for picture in pictures:
        Image.new("RGB", (12, 12), picture.stem).save(picture)
    places = ("--index", tmp_path / "index", "--model", model)
    assert "2 pictures, recall@10 1.000" in run("index", "add", *pictures[:2], *places).output
    assert "3 pictures" in run("index", "add", pictures[2], *places).output
    done = run("search", *pictures, *places, "-k", 1)
    assert [line.split("\t") for line in done.output.splitlines()] == [[str(p), "1.0000", str(p)] for p in pictures]
    assert "2 pictures" in run("index", "remove", pictures[0], "--index", tmp_path / "index").output
    assert str(pictures[0]) not in [
        line.split("\t")[2] for line in run("search", *pictures, *places).output.splitlines()
    ]
    other = make_model(tmp_path / "other", shards, seed=5)
    assert "queries come from model" in str(refused("search", pictures[0], *places[:2], "--model", other))


def test_an_index_of_another_layer(make_model: Callable[..., Path], shards: Path, tmp_path: Path) -> None:
    Image.new("RGB", (12, 12), "red").save(tmp_path / "red.png")
    deep = make_model(tmp_path / "model", shards, depth=2)
    places = (tmp_path / "red.png", "--index", tmp_path / "index", "--model", deep)
    assert "1 pictures" in run("index", "add", *places, "--layer", 0).output
    assert "1.0000" in run("search", *places, "--layer", "-2").output
    assert "block 0; encode them with that model" in str(refused("search", *places))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with classes by colour, and captions of its test pictures in COCO's file."""
    root = tmp_path_factory.mktemp("pictures")
    random, entries = np.random.default_rng(0), []
    for split, count in (("train", 8), ("test", 4)):
        for colour, rgb in COLOURS.items():
            for number in range(count):
                path = root / split / colour / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                noise = random.integers(-30, 30, (12, 12, 3))
                Image.fromarray((np.array(rgb) + noise).clip(0, 255).astype(np.uint8)).save(path)
                if split == "test":
                    entries.append({"image": f"{colour}/{number}.png", "caption": [f"{colour} fish", f"{colour} lamp"]})
    (root / "coco_karpathy_test.json").write_text(json.dumps(entries))
    return root


def test_probe(model: Path, pictures: Path, tmp_path: Path) -> None:
    quick = ("--epochs", 5, "--seeds", 2, "--cache", tmp_path / "cache", "--device", "cpu")
    wide = ("--poolings", "mean,max", "--shots", "2", "--attentive")
    done = run("probe", f"imagefolder:{pictures}", "--model", model, *quick, *wide, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    (results,) = read_json(tmp_path / "out" / "results.json")["sets"]
    by_name = {(row["features"], row["method"]): row for row in results["rows"]}
    assert {features for features, _ in by_name} == {str(model), f"{model}, untrained", "pixels 16x16"}
    methods = {"linear probe", "2-shot probe", "10-NN", "20-NN", "attentive probe"}
    assert {method for _, method in by_name} == methods
    assert ("pixels 16x16", "attentive probe") not in by_name
    assert by_name["pixels 16x16", "linear probe"]["top_1"] == 1
    assert by_name[str(model), "2-shot probe"]["train"] == 6
    assert results["most_frequent_class"] == pytest.approx(1 / 3)
    assert len(list((tmp_path / "cache").glob("*/rows.npy"))) == 2 * (3 + 3 + 1)
    layer = run("probe", f"imagefolder:{pictures}", "--model", model, *quick, "--layer", 0, "--no-floors")
    assert layer.exit_code == 0, layer.output
    assert "0 to 0" in str(refused("probe", f"imagefolder:{pictures}", "--model", model, *quick, "--layer", 1))
    assert "no list of numbers" in str(refused("probe", f"imagefolder:{pictures}", "--weight-decays", "a,b"))


def test_mistakes_of_a_probe_are_told_before_the_work(model: Path, pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    (tmp_path / "file").touch()
    good, cache = f"imagefolder:{pictures}", tmp_path / "cache"
    for arguments, message in (
        ((good, "--shots", "1,0"), "'0' is no whole number from 1"),
        ((good, "--shots", "2.5"), "'2.5' is no whole number from 1"),
        ((good, "--learning-rates", "0.1,0"), "learning_rates.1 = 0.0: input should be greater than 0"),
        ((good, "--weight-decays=-1"), "weight_decays.0 = -1.0: input should be greater than or equal to 0"),
        ((good, "--weight-decays", "nan"), "weight_decays.0 = nan"),
        ((good, "--learning-rates", ""), "learning_rates = []"),
        ((good, "--seeds", 0), "probe_seeds = 0"),
        ((good, "--epochs=-1"), "probe_epochs = -1"),
        ((good, "--poolings", "mean,maxx"), "did you mean 'max'"),
        ((good, "--layer", 9), "0 to 0"),
        ((good, "--out", tmp_path / "mine"), "would be replaced"),
        ((good, "--out", tmp_path / "file"), "would be replaced"),
        ((good, "--out", tmp_path / "file" / "out"), "cannot be made"),
        ((good, f"imagefolder:{tmp_path}/none"), "has no folders train and"),
        ((f"torchvision:fashion_mnist@{tmp_path}",), "FashionMNIST is not under"),
        ((f"folder:{pictures}",), "unknown kind of labelled data 'folder'"),
        ((f"shards:{tmp_path}",), "mdc stage shard"),
        ((f"webdataset:{tmp_path}",), "has no train*.tar"),
    ):
        error = refused("probe", *arguments, "--model", model, "--cache", cache, "--device", "cpu")
        assert message in str(error), arguments
    assert not cache.exists()
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_a_class_that_train_lacks_is_told(model: Path, pictures: Path, tmp_path: Path) -> None:
    shutil.copytree(pictures, tmp_path / "pictures")
    shutil.copytree(pictures / "test" / "red", tmp_path / "pictures" / "test" / "violet")
    quick = ("--epochs", 5, "--seeds", 1, "--cache", tmp_path / "cache", "--device", "cpu", "--no-floors")
    done = run("probe", f"imagefolder:{tmp_path}/pictures", "--model", model, *quick)
    assert done.exit_code == 0, done.output
    assert "4 test pictures are of classes that no training picture has" in done.output


def test_retrieve_and_zeroshot(model: Path, pictures: Path, tmp_path: Path) -> None:
    file, common = pictures / "coco_karpathy_test.json", ("--model", model, "--draws", 4)
    done = run("retrieve", file, "--images", pictures / "test", *common, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    results = read_json(tmp_path / "out" / "results.json")
    assert (results["pictures"], results["texts"], results["scorer"]) == (12, 6, "mc")
    assert results["picture_to_text"]["chance"]["recall_at_1"] == pytest.approx(2 / 6)
    told = run("zeroshot", f"imagefolder:{pictures}", *common, "--template", "{} fish", "--out", tmp_path / "told")
    assert told.exit_code == 0, told.output
    results = read_json(tmp_path / "told" / "results.json")
    assert (results["pictures"], results["classes"], results["blind"]["balanced"]) == (12, 3, pytest.approx(1 / 3))
    assert "longer than the model takes" in str(refused("zeroshot", f"imagefolder:{pictures}", *common))


def test_caption_scores(model: Path, pictures: Path, tmp_path: Path) -> None:
    file = pictures / "coco_karpathy_test.json"
    options = ("--references", file, "--lengths", "3,5", "--limit", 5, "--out", tmp_path / "out")
    done = run("caption", pictures / "test", "--model", model, *options)
    assert done.exit_code == 0, done.output
    results = read_json(tmp_path / "out" / "results.json")
    assert (results["pictures"], results["references"]) == (5, 10)
    assert [(row["sampler"], row["length"]) for row in results["rows"]] == [
        ("confidence", 3), ("confidence", 5), ("ancestral", 3), ("ancestral", 5)
    ]  # fmt: skip
    page = (tmp_path / "out" / "captions.html").read_text()
    assert page.count("<figure>") == page.count("data:image/jpeg;base64,") == 5
    assert "name pictures" in str(refused("caption", "--model", model))
    longer = ("--references", file, "--lengths", "3,50", "--model", model)
    assert "writes at most" in str(refused("caption", pictures / "test", *longer))
    done = run("caption", pictures / "test", "--references", file, "--model", model, "--limit", 1)
    assert done.exit_code == 0, done.output  # without lengths, those that the model takes


def test_encoders_of_others_have_their_place(pictures: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    save_file(timm.create_model("test_vit").state_dict(), tmp_path / "vit.safetensors")
    other = f"timm:test_vit@{tmp_path / 'vit.safetensors'}"
    quick = ("--epochs", 2, "--seeds", 1, "--cache", tmp_path / "cache", "--device", "cpu", "--out", tmp_path / "out")
    done = run("probe", f"imagefolder:{pictures}", "--model", other, *quick)
    assert done.exit_code == 0, done.output
    (results,) = read_json(tmp_path / "out" / "results.json")["sets"]
    names = {row["features"] for row in results["rows"]}
    assert names == {other, "pixels 16x16"}
    assert "writes no captions" in str(refused("fill", pictures / "a.png", "a [MASK]", "--model", other))
    assert "cannot score captions" in str(refused("zeroshot", f"imagefolder:{pictures}", "--model", other))


def test_export_and_back(model: Path, tmp_path: Path) -> None:
    assert "see README.md" in run("export", tmp_path / "encoder", "--model", model, "--no-onnx").output
    Image.new("RGB", (8, 8), "red").save(tmp_path / "red.png")
    ours, theirs = (mdc.load(path, "cpu").encode(tmp_path / "red.png") for path in (model, tmp_path / "encoder"))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("folders", ["own", "own/shards"])
def test_folders_of_others_are_neither_replaced_nor_cleared(model: Path, tmp_path: Path, folders: str) -> None:
    picture = tmp_path / folders / "deep" / "red.png"
    picture.parent.mkdir(parents=True)
    Image.new("RGB", (8, 8), "red").save(picture)
    before = sorted(tmp_path.rglob("*"))
    for command in (
        ("index", "add", picture, "--index", tmp_path / "own"),
        ("export", tmp_path / "own", "--no-onnx"),
        ("export", picture, "--no-onnx"),
    ):
        assert "would be replaced" in str(refused(*command, "--model", model))
    assert "cannot be made" in str(refused("index", "add", picture, "--index", picture / "x", "--model", model))
    assert "would be replaced" in str(refused("sample", tmp_path / "own"))
    assert sorted(tmp_path.rglob("*")) == before


def test_an_index_clears_only_its_own_versions(model: Path, tmp_path: Path) -> None:
    places = ("--index", tmp_path / "index", "--model", model)
    for number, colour in enumerate(("red", "green", "blue")):
        Image.new("RGB", (8, 8), colour).save(tmp_path / f"{colour}.png")
        assert run("index", "add", tmp_path / f"{colour}.png", *places).exit_code == 0
        (tmp_path / "index" / f"mine-{number}").mkdir()
    left = {path.name for path in (tmp_path / "index").iterdir() if path.is_dir()}
    assert {name for name in left if name.startswith("mine")} == {"mine-0", "mine-1", "mine-2"}
    assert len(left) == 5  # the version that holds, and the one before


def refused(*arguments: str | int | Path) -> BaseException:
    error = run(*arguments).exception
    assert isinstance(error, UserError)
    return error
