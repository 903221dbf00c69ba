"""`mdc.train` with a fault, for tests of the launcher: `FAULT=rank:step:kind`; the rank does it in that step."""

import os
import signal
import time
from collections.abc import Iterator

from mdc.data.loader import Batch
from mdc.train.__main__ import main
from mdc.train.trainer import Trainer

rank, step, kind = os.environ["FAULT"].split(":")
gradients = Trainer._gradients


def faulty(trainer: Trainer, batches: Iterator[Batch]) -> object:
    if trainer.rank == int(rank) and trainer.done == int(step):
        if kind == "raise":
            raise RuntimeError("the fault that was asked for")
        if kind == "sleep":
            time.sleep(600)
        os.kill(os.getppid() if kind == "stop" else os.getpid(), signal.SIGTERM if kind == "stop" else signal.SIGKILL)
        time.sleep(2)
    return gradients(trainer, batches)


Trainer._gradients = faulty  # type: ignore[assignment,method-assign]
main()
