"""A small labelled world: shards of coloured pictures, and models of random weights that see colours anyway."""

import io
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from mdc.config import ModelConfig, Params, PretrainParams, ShardParams, merge
from mdc.data.captions import SCHEMA
from mdc.data.shards import write_shards
from mdc.data.tars import FixedTar
from mdc.data.tokenizer import CaptionTokenizer
from mdc.files import write_manifest
from mdc.train.checkpoint import initial_model, save_model

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (30, 60, 220)}
THINGS = ["circle", "square", "star", "moon", "tree", "house", "boat", "fish", "bird", "lamp", "door", "sock"]
SPLIT_OF = {"lamp": "validation", "door": "validation", "sock": "test", "bird": "test", "fish": "test"}


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Threads cost more than they save at this size."""
    torch.set_num_threads(1)


def write_world(folder: Path, labelled: bool = True) -> Path:
    """Two pictures of each colour and thing; their class is the colour. A thing is in one split, as a group."""
    downloaded, captions = folder / "downloaded", folder / "captions"
    downloaded.mkdir(parents=True)
    captions.mkdir()
    named = [f"{colour} {thing}" for colour, thing in itertools.product(COLOURS, THINGS)]
    tokenizer = CaptionTokenizer.train(named, vocab_size=200, lowercase=True)
    tokenizer.save(captions / "tokenizer.json")
    random = np.random.default_rng(0)
    rows = []
    with (downloaded / "00000.tar").open("wb") as file:
        tar = FixedTar(file)
        for number, text in enumerate(named * 2):
            uid, (colour, thing) = f"u{number:03d}", text.split()
            picture = io.BytesIO()
            noise = random.integers(-60, 60, (12, 12, 3))
            pixels = np.clip(np.array(COLOURS[colour]) + noise, 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(picture, "png")
            tar.add(f"{uid}.png", picture.getvalue())
            row = {"uid": uid, "caption": text, "label": colour if labelled else "", "group": thing}
            row |= {"split": SPLIT_OF.get(thing, "train"), "tokens": tokenizer.encode([text])[0]}
            rows.append({**row, "kept": True, "reason": ""})
        tar.close()
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), captions / "captions.parquet")
    write_manifest(downloaded, {}, {})
    write_manifest(captions, {}, {})
    write_shards(ShardParams(samples_per_shard=30), downloaded, captions, folder / "shards")
    return folder / "shards"


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("labelled"))


@pytest.fixture(scope="session")
def unlabelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("unlabelled"), labelled=False)


@pytest.fixture(scope="session")
def params() -> Callable[..., Params]:
    """`params(evaluate={...})`: quick ones, with a rule that swaps the colour."""

    def make(**changes: Any) -> Params:
        base = {
            "compute": {"device": "cpu"},
            "extract": {"batch_size": 7, "pixel_size": 4},
            "evaluate": {
                "probe_epochs": 5,
                "probe_seeds": 2,
                "probe_weight_decays": [1e-3, 1e-2, 1e-1],
                "compositional_draws": 4,
                "swaps": {"colour": [list(COLOURS)], "thing": [["fish", "lamp", "boat"]]},
                "caption_length": 4,
                "metric_lengths": [3, 5],
                "pictures": 4,
            },
        }
        return Params.model_validate(merge(base, changes))

    return make


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Path]:
    """`make_model(folder, shards, objective="mdc", seed=0)`: a checkpoint folder as the training writes it."""

    def make(folder: Path, shards: Path, objective: str = "mdc", seed: int = 0) -> Path:
        pretrain = PretrainParams.model_validate(
            {
                "objective": objective,
                "image_size": 8,
                "encoder_options": {"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2},
                "decoder_width": 16,
                "decoder_depth": 1,
                "decoder_heads": 2,
                "embed_dim": 8,
            }
        )
        tokenizer = CaptionTokenizer.load(shards / "tokenizer.json")
        config = ModelConfig(pretrain=pretrain, vocabulary=tokenizer.vocabulary, max_tokens=6)
        folder.mkdir(parents=True)
        save_model(folder, initial_model(config, seed), config, shards / "tokenizer.json")
        write_manifest(folder, {}, {})
        return folder

    return make


@pytest.fixture(scope="session")
def model(make_model: Callable[..., Path], shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "model", shards, seed=1)


@pytest.fixture(scope="session")
def features(
    params: Callable[..., Params], shards: Path, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    from mdc.eval.features import extract_features

    folder = tmp_path_factory.mktemp("features") / "features"
    extract_features(params(), shards, model, folder)
    return folder
