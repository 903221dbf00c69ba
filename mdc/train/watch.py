"""What watches over a training: signals, clocks, numbers that are not finite, and the first failure of any rank."""

import contextlib
import json
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor

from mdc import dist
from mdc.data.loader import ShardDataset
from mdc.errors import UserError

SHOWN_UIDS = 8  # in messages


class Stop:
    """SIGTERM and SIGINT, held back within a `with` block until all ranks have finished the same step.

    Where `failure` exists another rank has failed, no common step will follow, and this rank ends at once.
    """

    def __init__(self, failure: Path) -> None:
        self.failure = failure
        self.number = 0
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self.before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.failure.exists():
            raise SystemExit(1)
        self.number = self.number or number  # Ctrl-C reaches every process of a terminal, and torchrun repeats it

    def agreed(self) -> int:
        """The number of the signal that any rank has received, 0 for none; the same answer on every rank."""
        return dist.all_reduce_max(self.number)


class Stopwatch:
    """Seconds of training, and how many of them went into waiting for data; pauses are left out."""

    def __init__(self) -> None:
        self.steps, self.start, self.waited = 0, time.perf_counter(), 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.waited += time.perf_counter() - start

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.start += time.perf_counter() - start

    def lap(self) -> tuple[int, float, float]:
        """(steps, seconds, seconds waited for data) since the last lap."""
        now = time.perf_counter()
        lap = self.steps, now - self.start, self.waited
        self.steps, self.start, self.waited = 0, now, 0.0
        return lap


class Guard:
    """Keeps an update whose loss or gradient is not finite away from the weights.

    On a GPU the verdict stays on the device, where the optimiser reads it: the bad update and all after it are left
    out, and the host learns of it when it next waits for the device anyway.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, dataset: ShardDataset, device: torch.device) -> None:
        self.optimizer, self.dataset = optimizer, dataset
        self.flag = torch.zeros((), device=device)
        self.pending: list[tuple[int, Tensor, list[tuple[list[str], Tensor]]]] = []

    def judge(self, step: int, sums: Tensor, norm: Tensor, parts: list[tuple[list[str], Tensor]]) -> None:
        """sums: (loss, count) over all ranks. norm: of the gradient. parts: uids and loss of this rank's batches."""
        finite = torch.isfinite(sums[0]) & torch.isfinite(norm)
        self.flag = torch.maximum(self.flag, (~finite).float())
        self.optimizer.found_inf = self.flag  # type: ignore[attr-defined]
        self.pending.append((step, self.flag, parts))
        if self.flag.device.type == "cpu":
            self.check()

    def check(self) -> None:
        """Wait for the device; raise FloatingPointError that names step, shards and uids if an update was bad."""
        if self.flag.item():
            step, parts = next((step, parts) for step, flag, parts in self.pending if flag.item())
            culprits = [uid for uids, loss in parts if not torch.isfinite(loss) for uid in uids]
            culprits = culprits or [uid for uids, _ in parts for uid in uids]
            everywhere = dist.gather_objects((culprits, any(not torch.isfinite(loss) for _, loss in parts)))
            guilty = [uids for uids, own in everywhere if own] or [uids for uids, _ in everywhere]
            raise FloatingPointError(self._message(step, [uid for uids in guilty for uid in uids]))
        self.pending.clear()

    def _message(self, step: int, uids: list[str]) -> str:
        samples = self.dataset.samples
        shard_of = dict(zip(samples["uid"].to_pylist(), samples["shard"].to_pylist(), strict=True))
        shown = ", ".join(uids[:SHOWN_UIDS]) + (f" and {len(uids) - SHOWN_UIDS} more" if len(uids) > SHOWN_UIDS else "")
        shards = ", ".join(sorted({shard_of[uid] for uid in uids}))
        return (
            f"step {step}: the loss or its gradient is not finite; stopped before the update. The batch came from "
            f"{shards}, uids {shown}. Look at these samples, or lower pretrain.lr or pretrain.clip_norm"
        )


@contextlib.contextmanager
def failures_recorded(failure: Path, launched: bool) -> Iterator[None]:
    """Leave the first failure of any rank in a file: it is the cause, and later ones follow from it.

    launched: a launcher reads the file and tells a user's mistake, so that it need not be told here as well.
    """
    try:
        yield
    except Exception as error:
        mistake = isinstance(error, UserError)
        record = {
            "rank": dist.rank(),
            "host": socket.gethostname(),
            "message": str(error) if mistake else f"{type(error).__name__}: {error}",
            "mistake": mistake,
        }
        try:
            with failure.open("x", encoding="utf-8") as file:
                json.dump(record, file)
        except FileExistsError:
            raise SystemExit(1) from None
        if mistake and launched:
            raise SystemExit(1) from None
        raise
