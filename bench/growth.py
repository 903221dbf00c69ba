"""Row `growth`: how the cost of a training step grows with the batch and with the ranks."""

import json
import os
import subprocess
import sys
from functools import partial
from statistics import median

from bench.frame import Growth, in_turn, rates, seconds

BATCHES, RANKS, ROUNDS = (8, 16, 32), (1, 2), 3
SMALL, ROWS, STEPS = "tiny", 64, 10  # the preset, batch and updates per round that ranks are compared with


def rank() -> None:
    """Time updates as one rank of those that torchrun started; the first prints images per second."""
    import torch

    from bench.training import Ours, hyperparameters, pairs
    from mdc import dist

    with dist.process_group(torch.device("cpu"), timeout_s=60):
        hyper = hyperparameters(preset=SMALL)
        batch, ours = pairs(hyper.image_size, ROWS), Ours(hyper)
        ours.step(batch)
        taken = seconds(lambda: [ours.step(batch) for _ in range(STEPS)])
        if dist.is_main():
            print(json.dumps(ROWS * STEPS / taken))


def _with_ranks(count: int) -> float:
    """Images per second of `count` ranks with one thread each."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "-m", "bench.growth"], stdout=subprocess.PIPE, check=True, env=environment)
    return float(json.loads(done.stdout))


def measure() -> list[Growth]:
    from bench.training import Ours, hyperparameters, pairs

    hyper = hyperparameters()
    ours = Ours(hyper)
    steps = {str(size): partial(ours.step, pairs(hyper.image_size, size)) for size in BATCHES}
    by_batch = {size: rates(int(size), taken) for size, taken in in_turn(steps, ROUNDS).items()}
    del ours, steps
    by_ranks: dict[str, list[float]] = {str(count): [] for count in RANKS}
    for _ in range(ROUNDS):
        for count in RANKS:
            by_ranks[str(count)].append(_with_ranks(count))
    gain = median(by_ranks["2"]) / median(by_ranks["1"])
    return [
        Growth(
            "growth",
            "training step of row `step`, by batch",
            "images/s",
            by_batch,
            "a small batch pays the optimiser and the reading of the weights for fewer pictures",
        ),
        Growth(
            "growth",
            f"training step, preset `{SMALL}`, batch {ROWS} over all ranks, one thread each, by ranks",
            "images/s",
            by_ranks,
            f"two gloo ranks on two cores do {gain:.2f} times the work of one on one core",
        ),
    ]


if __name__ == "__main__":
    rank()
