"""Rank, world, reductions and gathers. With one process every function is the identity."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from mdc.errors import UserError

T = TypeVar("T")

_alone = False  # within `alone()`


def is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized() and not _alone


@contextmanager
def alone() -> Iterator[None]:
    """Let this process stand alone for a while: no gathers or reductions with other ranks."""
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


def rank() -> int:
    return dist.get_rank() if is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if is_initialized() else 1


def is_main() -> bool:
    return rank() == 0


def local_rank() -> int:
    """The rank within this machine, which is also the number of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def pick_device(setting: str) -> torch.device:
    """The device of this rank for `compute.device`: "cpu", "cuda", or "auto" for a GPU where there is one."""
    if setting == "cpu" or (setting == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(f"compute.device is {setting!r} but this machine shows no GPU; set compute.device: auto or cpu")
    return torch.device("cuda", local_rank())


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on `device`. The host does not wait: from pinned memory the copy takes its turn there."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """The sum over ranks, without gradient; the same shape on every rank."""
    if world_size() == 1:
        return tensor
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total


def all_reduce_max(values: list[int]) -> list[int]:
    """The largest of each value over ranks. They live on the host: asking for them does not wait for a device."""
    if world_size() == 1:
        return values
    highest = torch.tensor(values)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return highest.tolist()


def gather_objects(value: T) -> list[T]:
    """Every rank's value, in rank order."""
    if world_size() == 1:
        return [value]
    values: list[T | None] = [None] * world_size()
    dist.all_gather_object(values, value)
    return cast(list[T], values)


def all_gather(tensor: Tensor) -> Tensor:
    """`[B, ...]` of every rank stacked to `[world * B, ...]` in rank order, with gradient to every rank's part."""
    if world_size() == 1:
        return tensor
    return _Gather.apply(tensor)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(_context: Any, own: Tensor) -> Tensor:
        everywhere = own.new_empty(world_size() * len(own), *own.shape[1:])
        dist.all_gather_into_tensor(everywhere, own.contiguous())
        return everywhere

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> Tensor:
        own = gradient.new_empty(len(gradient) // world_size(), *gradient.shape[1:])
        dist.reduce_scatter_tensor(own, gradient.contiguous())
        return own


@contextmanager
def process_group(device: torch.device, timeout_s: float) -> Iterator[None]:
    """The group that torchrun's variables describe: NCCL for tensors on a GPU, gloo for those on the host.

    timeout_s: seconds after which a rank that waits for a silent one fails.
    """
    if "RANK" not in os.environ:
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    try:
        yield
    finally:
        dist.destroy_process_group()
