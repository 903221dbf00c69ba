"""A small labelled world: shards of coloured pictures, and models of random weights that see colours anyway."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from labelled_world import COLOURS, write_world

from mdc.config import ModelConfig, Params, PretrainParams, merge
from mdc.data.tokenizer import CaptionTokenizer
from mdc.files import write_manifest
from mdc.train.checkpoint import initial_model, save_model


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Threads cost more than they save at this size."""
    torch.set_num_threads(1)


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
    """`make_model(folder, shards, objective="mdc", seed=0, depth=1)`: a checkpoint folder as the training writes it."""

    def make(folder: Path, shards: Path, objective: str = "mdc", seed: int = 0, depth: int = 1) -> Path:
        pretrain = PretrainParams.model_validate(
            {
                "objective": objective,
                "image_size": 8,
                "encoder_options": {"patch_size": 4, "embed_dim": 16, "depth": depth, "num_heads": 2},
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

    folder = tmp_path_factory.mktemp("features")
    extract_features(params(), shards, model, folder / "cache", folder / "features")
    return folder / "features"
