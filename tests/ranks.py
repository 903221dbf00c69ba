"""Real gloo ranks: processes forked from one that has imported everything, so that starting them takes no time."""

import functools
import multiprocessing
import os
import signal
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mdc import dist
from mdc.config import Params
from mdc.data.loader import Batch, ShardDataset
from mdc.objectives import TextImage
from mdc.train import strategy, trainer


@dataclass
class Record:
    """What one rank saw of a training, update by update."""

    uids: list[tuple[int, int, list[str]]] = field(default_factory=list)  # step, first row, samples
    rates: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[int, Tensor]] = field(default_factory=list)  # whole, scaled and clipped
    asked: int = 0  # times that ranks agreed on whether to stop
    exit: int | str | None = None


def _observe(record: Record, stop_at: int | None) -> None:
    """stop_at: SIGTERM comes in the update of this number."""
    clip, augmented, set_rate = trainer.scale_and_clip, trainer.Trainer._augmented, trainer.set_learning_rate
    agree = dist.all_reduce_max

    def agreed(values: list[int]) -> list[int]:
        record.asked += 1
        return agree(values)

    def clipped(parameters: Iterable[torch.nn.Parameter], scale: Tensor, max_norm: float) -> Tensor:
        norm = clip(parameters, scale, max_norm)
        record.norms.append(float(norm))
        record.gradients.append(strategy.host_copy({number: p.grad for number, p in enumerate(parameters)}, keep=True))
        return norm

    def seen(self: trainer.Trainer, batch: Batch) -> TextImage:
        record.uids.append((batch.step, batch.first, batch.uids))
        if batch.step == stop_at:
            signal.raise_signal(signal.SIGTERM)
        return augmented(self, batch)

    def rated(optimizer: torch.optim.Optimizer, rate: float) -> None:
        record.rates.append(rate)
        set_rate(optimizer, rate)

    dist.all_reduce_max = agreed
    trainer.scale_and_clip = clipped
    trainer.Trainer._augmented = seen  # type: ignore[method-assign]
    trainer.set_learning_rate = rated


def _rank(
    environment: dict[str, str], params: Params, paths: tuple[Path, Path, Path], result: Path, **how: Any
) -> None:
    os.environ.update(environment)
    multiprocessing.set_start_method("fork", force=True)  # for loader processes, as in a process of its own
    torch.set_num_threads(1)
    if how.pop("uncached", False):
        trainer.ShardDataset = functools.partial(ShardDataset, cache_bytes=0)  # type: ignore[misc,assignment]
    record = Record()
    _observe(record, **how)
    try:
        trainer.train(params, *paths)
    except SystemExit as end:
        record.exit = end.code
    torch.save(vars(record), result)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def train_on(
    world: int,
    params: Params,
    shards: Path,
    output: Path,
    runs: Path,
    stop: dict[int, int] | None = None,
    uncached: bool = False,
    patience_s: float = 120,
) -> list[Record]:
    """Train on `world` ranks; what each of them saw.

    stop: by rank, the update in which SIGTERM comes. uncached: pictures are read in loader processes.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ranks"])
    port, results = _free_port(), [output.parent / f".{output.name}-{rank}.pt" for rank in range(world)]
    ranks = []
    for rank, result in enumerate(results):
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
        environment |= {"WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
        result.unlink(missing_ok=True)
        process = context.Process(
            target=_rank,
            args=(environment, params, (shards, output, runs), result),
            kwargs={"stop_at": (stop or {}).get(rank), "uncached": uncached},
        )
        process.start()
        ranks.append(process)
    for process in ranks:
        process.join(patience_s)
    assert [process.exitcode for process in ranks] == [0] * world
    return [Record(**torch.load(result, weights_only=False)) for result in results]


def samples_by_step(records: list[Record]) -> dict[int, list[str]]:
    """The global batch of each update, whoever had which part of it."""
    parts = sorted((step, first, uids) for record in records for step, first, uids in record.uids)
    return {step: list(_of(parts, step)) for step, _, _ in parts}


def _of(parts: list[tuple[int, int, list[str]]], step: int) -> Iterator[str]:
    return (uid for at, _, uids in parts for uid in uids if at == step)
