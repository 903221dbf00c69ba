"""A small world to train in: real shards made on the fly, and parameters of a model that learns in milliseconds."""

import io
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from mdc.config import Params, ShardParams, merge
from mdc.data.captions import SCHEMA
from mdc.data.packing import write_shards
from mdc.data.tars import FixedTar
from mdc.data.tokenizer import CaptionTokenizer
from mdc.files import write_manifest

WORDS = (["red", "green", "blue", "black"], ["circle", "square", "star", "moon"], ["hill", "sea", "road"])


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Threads cost more than they save at this size, and some tests fork."""
    torch.set_num_threads(1)


def write_world(folder: Path, seed: int = 0, validation: bool = True) -> Path:
    """48 pairs of noise and a caption of two to four words, in three shards."""
    downloaded, captions = folder / "downloaded", folder / "captions"
    downloaded.mkdir(parents=True)
    captions.mkdir()
    texts = [" ".join(words[: 2 + number % 2]) for number, words in enumerate(itertools.product(*WORDS))]
    tokenizer = CaptionTokenizer.train(texts, vocab_size=200, lowercase=True)
    tokenizer.save(captions / "tokenizer.json")
    generator = np.random.default_rng(seed)
    with (downloaded / "00000.tar").open("wb") as file:
        tar = FixedTar(file)
        for number in range(len(texts)):
            picture = io.BytesIO()
            Image.fromarray(generator.integers(0, 256, (12, 12, 3), dtype=np.uint8)).save(picture, "png")
            tar.add(f"u{number:03d}.png", picture.getvalue())
        tar.close()
    rows = [
        {
            "uid": f"u{number:03d}",
            "caption": text,
            "label": "",
            "group": "",
            "split": "validation" if validation and number % 4 == 0 else "train",
            "tokens": tokenizer.encode([text])[0],
            "kept": True,
            "reason": "",
        }
        for number, text in enumerate(texts)
    ]
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), captions / "captions.parquet")
    write_manifest(downloaded, {}, {})
    write_manifest(captions, {}, {})
    write_shards(ShardParams(samples_per_shard=20), downloaded, captions, folder / "shards")
    return folder / "shards"


@pytest.fixture(scope="session")
def make_shards() -> Callable[..., Path]:
    """`make_shards(folder, seed=0, validation=True)`: other data."""
    return write_world


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def small_params() -> Callable[..., Params]:
    """`small_params(**pretrain)`: 8 steps of batch 8; other sections by name, as `compute={...}`."""

    def make(**changes: Any) -> Params:
        sections = {name: changes.pop(name) for name in ("compute", "tracking") if name in changes}
        pretrain = {
            "image_size": 8,
            "encoder_options": {"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2},
            "decoder_width": 16,
            "decoder_depth": 1,
            "decoder_heads": 2,
            "embed_dim": 16,
            "steps": 8,
            "batch_size": 8,
            "lr": 0.01,
            "warmup_steps": 3,
            "log_every": 1,
            "validate_every": 4,
            "checkpoint_every": 100,
            **changes,
        }
        base = {"pretrain": pretrain, "compute": {"device": "cpu", "workers": 0}, "tracking": {"uri": ""}}
        return Params.model_validate(merge(base, sections))

    return make


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database with its tables made, which takes seconds."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def database(empty_database: Path, tmp_path: Path) -> str:
    """The URI of an MLflow database of the test's own."""
    shutil.copyfile(empty_database, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path / 'mlflow.db'}"
