"""What watches over a training: signals, and numbers that are not finite."""

import logging
import signal
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor

from mdc import dist
from mdc.data.loader import ShardDataset

log = logging.getLogger(__name__)

SHOWN_UIDS = 8  # in messages


class Stop:
    """SIGTERM and SIGINT, held back from `hold` to the end of a `with` block until all ranks finish the same step.

    Before the first step there is nothing to save: a rank that held them back would wait for others that have ended.
    Where `failure` exists another rank has failed, no common step will follow, and this rank ends at once.
    """

    def __init__(self, failure: Path) -> None:
        self.failure = failure
        self.number = 0
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        return self

    def hold(self) -> None:
        self.before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.failure.exists():
            raise SystemExit(1)
        self.number = self.number or number  # Ctrl-C reaches every process of a terminal, and torchrun repeats it


class Guard:
    """Keeps an update whose loss or gradient is not finite away from the weights.

    Such an update is left out as if its step had no batch: weights, optimiser state and average stay as they are, and
    every other step has the samples, masks and learning rate that it would have had. All ranks leave out the same
    updates, since they judge what is summed over all of them. After more than `limit` in the whole training, restarts
    included, the training stops before the next one.

    The verdict stays on the device, where the optimiser reads it. On a GPU the host learns of it when it next waits for
    the device anyway; past the limit nothing more is updated until then.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, dataset: ShardDataset, device: torch.device, limit: int = 0
    ) -> None:
        self.optimizer, self.dataset, self.limit = optimizer, dataset, limit
        self.bad_updates = torch.zeros((), device=device)
        self.told = 0  # of the bad updates
        self.pending: list[tuple[int, Tensor, list[tuple[list[str], Tensor]]]] = []

    def resume(self, left_out: int) -> None:
        """left_out: updates of this training that were left out before."""
        self.bad_updates.fill_(left_out)
        self.told = left_out

    def judge(self, step: int, sums: Tensor, norm: Tensor, parts: list[tuple[list[str], Tensor]]) -> Tensor:
        """Whether the update is left out: 1.0 or 0.0, on the device.

        sums: (loss, count) over all ranks. norm: of the gradient. parts: uids and loss of this rank's batches.
        """
        bad = (~(torch.isfinite(sums[0]) & torch.isfinite(norm))).float()
        self.bad_updates += bad
        left_out = torch.maximum(bad, (self.bad_updates > self.limit).float())
        if self.optimizer.defaults["fused"]:  # the others do not read it
            self.optimizer.found_inf = left_out  # type: ignore[attr-defined]
        self.pending.append((step, bad, parts))
        if bad.device.type == "cpu":
            self.check()
        return left_out

    def check(self) -> None:
        """Wait for the device; tell step, shards and uids of each bad update, with FloatingPointError past the limit.

        All ranks take part.
        """
        if int(self.bad_updates.item()) > self.told:
            for step, bad, parts in self.pending:
                if bad.item():
                    self._tell(step, parts)
        self.pending.clear()

    def _tell(self, step: int, parts: list[tuple[list[str], Tensor]]) -> None:
        self.told += 1
        culprits = [uid for uids, loss in parts if not torch.isfinite(loss) for uid in uids]
        everywhere = dist.gather_objects((culprits, [uid for uids, _ in parts for uid in uids]))
        guilty = [uid for own, _ in everywhere for uid in own] or [uid for _, all_ in everywhere for uid in all_]
        what, where = f"step {step}: the loss or its gradient is not finite", self._origin(guilty)
        if self.told <= self.limit:
            log.warning(
                "%s; this update is left out, %d of at most %d (pretrain.skip_nonfinite). %s",
                *(what, self.told, self.limit, where),
            )
            return
        before = f" after {self.limit} that were left out" if self.limit else ""
        raise FloatingPointError(
            f"{what}; stopped before the update{before}. {where}. Look at these samples, lower pretrain.lr or "
            "pretrain.clip_norm, or let more such updates be left out with pretrain.skip_nonfinite"
        )

    def _origin(self, uids: list[str]) -> str:
        shown = ", ".join(uids[:SHOWN_UIDS]) + (f" and {len(uids) - SHOWN_UIDS} more" if len(uids) > SHOWN_UIDS else "")
        return f"The batch came from {', '.join(self.dataset.shards_of(uids))}, uids {shown}"
