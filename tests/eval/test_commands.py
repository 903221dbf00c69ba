"""The commands that measure any checkpoint, as users call them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
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


def test_export_and_back(model: Path, tmp_path: Path) -> None:
    assert "see README.md" in run("export", tmp_path / "encoder", "--model", model, "--no-onnx").output
    Image.new("RGB", (8, 8), "red").save(tmp_path / "red.png")
    ours, theirs = (mdc.load(path, "cpu").encode(tmp_path / "red.png") for path in (model, tmp_path / "encoder"))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def refused(*arguments: str | int | Path) -> BaseException:
    error = run(*arguments).exception
    assert isinstance(error, UserError)
    return error
