"""The folder of a training under way: its name, and the files beside its checkpoints."""

from pathlib import Path
from typing import Any

from mdc import files
from mdc.config import Params
from mdc.data.shards import read_index
from mdc.data.tokenizer import FILE as TOKENIZER_FILE
from mdc.data.tokenizer import CaptionTokenizer

RUN = "run.json"  # the MLflow run and its status
FAILURE = "failure.json"  # the first failure of any rank
COST = "cost.json"  # beside the folders of trainings: how long the newest finished one took
# What may change without another loss at any step: such a training is taken up again.
BOOKKEEPING = {"checkpoint_every", "checkpoint_minutes", "keep_checkpoints", "keep_every", "skip_nonfinite"}


def fingerprint(params: Params, version: str, vocabulary: dict[str, Any]) -> str:
    """A hash of all that decides the losses of a training: data, parameters and vocabulary."""
    return files.fingerprint(
        {
            "data": version,
            "pretrain": params.pretrain.model_dump(exclude=BOOKKEEPING),
            "max_tokens": params.caption.max_tokens,
            "vocabulary": vocabulary,
        }
    )


def work_folder(params: Params, shards: Path, runs: Path) -> Path:
    """Where a training keeps its checkpoints: another folder as soon as its data or parameters are others."""
    files.read_manifest(shards, made_by="shard")
    vocabulary = CaptionTokenizer.load(str(shards / TOKENIZER_FILE)).vocabulary.model_dump()
    return runs / f"pretrain-{fingerprint(params, read_index(shards)['version'], vocabulary)}"
