"""`mdc.train` with a fault, for tests of the launcher: `FAULT=rank:step:kind`; the rank does it in that step."""

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mdc.data.loader import Batch
from mdc.objectives import TextImage
from mdc.train import preflight
from mdc.train.__main__ import main
from mdc.train.preflight import Place
from mdc.train.trainer import Trainer

rank, step, kind = os.environ["FAULT"].split(":")
gradients, augmented = Trainer._gradients, Trainer._augmented


def faulty(trainer: Trainer, batches: Iterator[Batch]) -> object:
    if kind in ("raise", "sleep", "stop", "kill") and trainer.rank == int(rank) and trainer.done == int(step):
        if kind == "raise":
            raise RuntimeError("the fault that was asked for")
        if kind == "sleep":
            time.sleep(600)
        os.kill(os.getppid() if kind == "stop" else os.getpid(), signal.SIGTERM if kind == "stop" else signal.SIGKILL)
        time.sleep(2)
    return gradients(trainer, batches)


def without_numbers(trainer: Trainer, batch: Batch) -> TextImage:
    inputs = augmented(trainer, batch)
    if kind == "nan" and trainer.rank == int(rank) and batch.step == int(step):
        inputs.images_BCHW[0] = torch.nan
    return inputs


def with_other_software(name: str) -> str:
    return "0.0"


folders = Place.folders


def elsewhere(place: Place) -> str:
    with tempfile.TemporaryDirectory() as other:
        return folders(replace(place, work=Path(other)))


def met(*arguments: Any, **options: Any) -> None:
    Path(os.environ["MET"]).touch()
    meet(*arguments, **options)


if kind == "late":  # the others wait for it
    if os.environ["RANK"] == rank:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # as `main` does
        Path(os.environ["MET"] + "-late").touch()
        time.sleep(600)
    meet = torch.distributed.init_process_group
    torch.distributed.init_process_group = met
if kind == "differ" and os.environ["RANK"] == rank:
    preflight.version = with_other_software  # type: ignore[assignment]
    Place.folders = elsewhere  # type: ignore[assignment,method-assign]
Trainer._augmented = without_numbers  # type: ignore[assignment,method-assign]
Trainer._gradients = faulty  # type: ignore[assignment,method-assign]
main()
