"""What ranks agree on between two updates: whether to stop, and whether a checkpoint is due by the clock."""

import time

from mdc import dist
from mdc.train.watch import Stop

WITHIN_S = 1.0  # a signal is obeyed within so many seconds, or an update
MOST = 16  # updates between two questions, should they become slow all of a sudden


class Pulse:
    """Asks all ranks rarely enough to cost nothing: once in as many updates as take about a second; one alone, always.

    stop: the signals of this rank. minutes: between checkpoints by the clock of rank 0; 0 for none.
    """

    def __init__(self, stop: Stop, minutes: float) -> None:
        self.stop, self.minutes = stop, minutes
        self.every = 1  # updates between two questions; the same on every rank
        self.updates = 0  # since the last one
        self.asked = self.saved = time.monotonic()

    def rest(self) -> None:
        """A checkpoint has been taken: the clock starts anew."""
        self.saved = time.monotonic()

    def beat(self, ask: bool) -> tuple[int, bool]:
        """To be called by all ranks after each update: the signal that any rank has received, and whether to save.

        0 is no signal. ask: ask now in any case; the same on every rank.
        """
        self.updates += 1
        if dist.world_size() > 1 and self.updates < self.every and not ask:
            return 0, False
        now = time.monotonic()
        pace = int(self.updates * WITHIN_S / max(now - self.asked, 1e-3))  # updates that take so long
        due = dist.is_main() and 0 < 60 * self.minutes <= now - self.saved
        number, save, minus_pace = dist.all_reduce_max([self.stop.number, int(due), -pace])  # the slowest decides
        self.every = min(max(-minus_pace, 1), 2 * self.every, MOST)
        self.updates, self.asked = 0, now
        return number, bool(save)
