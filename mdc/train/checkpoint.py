"""Checkpoints: a folder whose three files rebuild a model anywhere, with its trainer's state beside them in a run.

config.json         the ModelConfig: rebuilds the architecture
model.safetensors   the weights, by name
tokenizer.json      the tokenizer that the captions were made with
"""

import logging
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mdc import files
from mdc.config import ModelConfig, choose, describe
from mdc.data.tokenizer import CaptionTokenizer
from mdc.draws import derive_seed
from mdc.errors import UserError
from mdc.objectives import OBJECTIVES

log = logging.getLogger(__name__)

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"


@dataclass(frozen=True)
class LoadedModel:
    """A trained model, ready to use: in evaluation mode, on its device, without gradients."""

    model: nn.Module
    config: ModelConfig
    tokenizer: CaptionTokenizer
    fingerprint: str  # of weights and configuration

    def mark(self, layer: int | None) -> str:
        """The fingerprint, with the block of the encoder where its features are not those of the last one."""
        block = self.model.encoder.block(layer)  # type: ignore[union-attr,operator]
        return self.fingerprint if block is None else f"{self.fingerprint}, block {block}"


def fingerprint(folder: Path) -> str:
    """A short hash of a checkpoint's weights and configuration."""
    return files.fingerprint({name: files.sha256(folder / name) for name in (CONFIG, WEIGHTS)})


def initial_model(config: ModelConfig, seed: int) -> nn.Module:
    """The model before its first update, in training mode on the CPU; the same seed gives the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "weights"))
        return choose("objective", config.pretrain.objective, OBJECTIVES).build(config)


def untrained_model(config: ModelConfig, seed: int) -> nn.Module:
    """The same architecture with random weights, in evaluation mode: the floor that training must beat."""
    return initial_model(_without_download(config), seed).eval().requires_grad_(False)


def _without_download(config: ModelConfig) -> ModelConfig:
    """The architecture alone: do not fetch the encoder weights that training started from."""
    return config.model_copy(update={"pretrain": config.pretrain.model_copy(update={"encoder_pretrained": False})})


def save_model(folder: Path, model: nn.Module | dict[str, Tensor], config: ModelConfig, tokenizer_path: Path) -> None:
    """Write the three files into `folder`, which exists. The bytes depend on the arguments alone."""
    state = model.state_dict() if isinstance(model, nn.Module) else model
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    (folder / CONFIG).write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / WEIGHTS)
    shutil.copymode(folder / CONFIG, folder / WEIGHTS)  # safetensors lets its owner alone read it
    shutil.copyfile(tokenizer_path, folder / TOKENIZER)


def read_config(folder: Path) -> ModelConfig:
    """The configuration of a checkpoint folder; raises UserError if the folder is none."""
    path = folder / CONFIG
    if not path.is_file():
        raise UserError(
            f"{folder} is no checkpoint: it has no {CONFIG}; give the folder that `mdc stage pretrain` wrote"
        )
    try:
        return ModelConfig.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise UserError(describe(error, str(path), ModelConfig)) from None


def load_model(folder: Path | str, device: torch.device | str = "cpu") -> LoadedModel:
    """Rebuild a model from its checkpoint folder; every weight must be there and of its shape, and no other.

    Raises UserError where the folder is no checkpoint, or its files do not belong together.
    """
    folder = Path(folder)
    config = read_config(folder)
    if (folder / files.MANIFEST).is_file() and (problem := files.damage(folder)):
        raise UserError(f"{folder} is damaged: {problem}; bring it back with `dvc checkout`, or train again")
    model = initial_model(_without_download(config), seed=0)
    try:
        model.load_state_dict(load_file(folder / WEIGHTS), strict=True)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise UserError(f"{folder / WEIGHTS} does not hold the weights that {CONFIG} asks for: {error}") from None
    model.to(device).eval().requires_grad_(False)
    tokenizer = CaptionTokenizer.load(str(folder / TOKENIZER))
    return LoadedModel(model, config, tokenizer, fingerprint(folder))


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints of a training under way: `step-00000500/` holds the three files, and what the trainer needs to go on.

STATE, PROGRESS = "trainer.pt", "progress.json"


def step_folders(work: Path) -> list[Path]:
    """The checkpoints in `work`, newest first, good or not."""
    return sorted((folder for folder in work.glob("step-*") if folder.is_dir()), reverse=True)


def newest_checkpoint(work: Path) -> Path | None:
    """The newest checkpoint in `work` that is whole. Says which ones it passed over; removes nothing."""
    for folder in step_folders(work):
        problem = files.damage(folder, read_up_to=inf)
        if not problem:
            return folder
        log.warning("checkpoint %s is damaged (%s); taking the one before it", folder, problem)
    return None


def _save_state(state: dict[str, Any], path: Path) -> None:
    try:
        with path.open("wb") as file:
            torch.save(state, file)
    except RuntimeError as error:  # torch's word for a file that does not grow; what happened is in its context
        raise OSError(f"{path.name}: {error.__context__ or error}") from error


@dataclass(frozen=True)
class Snapshot:
    """A training at one moment, in host memory: what a checkpoint holds."""

    step: int
    weights: dict[str, Tensor]
    state: dict[str, Any]  # tensors and numbers, for torch.save
    progress: dict[str, Any]  # what JSON can hold


@dataclass(frozen=True)
class Store:
    """Where the checkpoints of a training go, and which of them stay.

    keep: the newest so many. keep_every: also those of every so many steps, 0 for none. damaged: folders that were
    passed over; they go with the first good checkpoint.
    """

    work: Path
    config: ModelConfig
    tokenizer_path: Path
    keep: int
    keep_every: int = 0
    damaged: frozenset[Path] = frozenset()

    def save(self, snapshot: Snapshot) -> Path:
        """Write `step-<step>` under another name, read it back, let it appear, and only then remove older ones."""
        folder = self.work / f"step-{snapshot.step:08d}"
        with files.whole_folder(folder) as temporary:
            save_model(temporary, snapshot.weights, self.config, self.tokenizer_path)
            _save_state(snapshot.state, temporary / STATE)
            files.write_json(temporary / PROGRESS, snapshot.progress)
            files.write_manifest(temporary, inputs={}, counts={"steps": snapshot.step})
            problem = files.damage(temporary, read_up_to=inf)
            if problem:
                raise OSError(f"checkpoint {folder} does not read back as written: {problem}")
        for old in self.outdated(folder):
            shutil.rmtree(old)
        return folder

    def outdated(self, newest: Path) -> list[Path]:
        others = [folder for folder in step_folders(self.work) if folder != newest]
        damaged = [folder for folder in others if folder in self.damaged]
        older = [folder for folder in others if folder < newest and folder not in self.damaged]
        return damaged + [folder for folder in older[self.keep - 1 :] if not self.stays(folder)]

    def close(self) -> None:
        """The training is over: leave the checkpoints that are kept for good in `kept-<work>`, and nothing else."""
        kept = [folder for folder in step_folders(self.work) if self.stays(folder)]
        if kept:
            with files.whole_folder(self.work.with_name(f"kept-{self.work.name}")) as temporary:
                for folder in kept:
                    folder.rename(temporary / folder.name)
        shutil.rmtree(self.work)

    def stays(self, folder: Path) -> bool:
        """Whether a checkpoint is kept for good."""
        step = int(folder.name.removeprefix("step-"))
        return folder not in self.damaged and self.keep_every > 0 and step % self.keep_every == 0


class Writer:
    """Writes checkpoints beside the training, one at a time.

    One that cannot be written (the disk is full) is told at once and costs only itself: older ones stay, and the
    training goes on. It ends when the next one fails as well, or when it was to be stopped with that one.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[bool] | None = None
        self._failed = False

    def start(self, snapshot: Snapshot) -> None:
        """Wait for the one before, and write `snapshot` while the caller goes on."""
        self.wait()
        self._pending = self._thread.submit(self._written, snapshot, may_fail=not self._failed)

    def wait(self, needed: bool = False) -> None:
        """Wait until nothing is being written. Raises OSError if two failed in a row, or the last one is `needed`."""
        if self._pending is not None:
            self._failed = not self._pending.result()
            self._pending = None
        if needed and self._failed:
            raise OSError(f"the last checkpoint could not be written; {self.store.work} holds the ones before it")

    def _written(self, snapshot: Snapshot, may_fail: bool) -> bool:
        try:
            self.store.save(snapshot)
        except (OSError, SafetensorError) as error:
            if not may_fail:
                raise OSError(f"two checkpoints in a row could not be written: {error}") from error
            log.error(
                "the checkpoint of step %d could not be written (%s); older ones are kept, and training goes on until "
                "the next one is due: make room",
                snapshot.step,
                error,
            )
            return False
        return True


def load_checkpoint(folder: Path, model: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load the weights into `model`, strictly, and return (state, progress) as they were saved, on the CPU.

    The state is mapped from its file, so that ranks of one machine share the memory.
    """
    model.load_state_dict(load_file(folder / WEIGHTS), strict=True)
    state = torch.load(folder / STATE, map_location="cpu", weights_only=True, mmap=True)
    return state, files.read_json(folder / PROGRESS)
