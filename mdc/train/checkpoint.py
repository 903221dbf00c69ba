"""Checkpoints: a folder whose three files rebuild a model anywhere, with its trainer's state beside them in a run.

config.json         the ModelConfig: rebuilds the architecture
model.safetensors   the weights, by name
tokenizer.json      the tokenizer that the captions were made with
"""

import logging
import shutil
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


def save_checkpoint(
    work: Path,
    step: int,
    model: nn.Module,
    config: ModelConfig,
    tokenizer_path: Path,
    state: dict[str, Any],
    progress: dict[str, Any],
    keep: int,
) -> Path:
    """Write `step-<step>` whole, read it back, and only then remove all but the newest `keep` checkpoints.

    state: tensors and numbers, for torch.save. progress: what JSON can hold.
    """
    folder = work / f"step-{step:08d}"
    with files.whole_folder(folder) as temporary:
        save_model(temporary, model, config, tokenizer_path)
        torch.save(state, temporary / STATE)
        files.write_json(temporary / PROGRESS, progress)
        files.write_manifest(temporary, inputs={}, counts={"steps": step})
    problem = files.damage(folder, read_up_to=inf)
    if problem:
        raise OSError(f"checkpoint {folder} does not read back as written ({problem}); older ones are kept")
    for old in [other for other in step_folders(work) if other < folder][keep - 1 :]:
        shutil.rmtree(old)
    return folder


def load_checkpoint(folder: Path, model: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load the weights into `model`, strictly, and return (state, progress) as they were saved, on the CPU."""
    model.load_state_dict(load_file(folder / WEIGHTS), strict=True)
    state = torch.load(folder / STATE, map_location="cpu", weights_only=True)
    return state, files.read_json(folder / PROGRESS)
