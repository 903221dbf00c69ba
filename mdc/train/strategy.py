"""How ranks share a model: each holds all of it (DDP), or a shard of every parameter (FSDP2).

The loop does not know which. Checkpoints do not either: tensors enter and leave this module whole and plain, so that a
training goes on with another number of ranks or the other strategy.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from mdc import dist
from mdc.config import ComputeParams


def layers(model: nn.Module) -> list[nn.Module]:
    return cast(Callable[[], list[nn.Module]], model.blocks)()


def prepare_layers(model: nn.Module, compute: ComputeParams) -> None:
    """Make each layer forget its activations until the backward pass, and compile it, as `compute` says.

    Layer by layer, since equal layers are compiled once, and since compiled regions must not reach across the
    exchanges of DDP and FSDP. Random draws of a layer are the same when it is computed again. A layer's own forward
    pass, which keeps its activations, becomes its `keeping`.
    """
    for layer in layers(model):
        forward = layer.forward
        layer.keeping = forward  # type: ignore[assignment]
        if compute.activation_checkpointing:
            forward = partial(checkpoint, forward, use_reentrant=False)
        if compute.compile:
            forward = torch.compile(forward)
        layer.forward = forward


def spread(model: nn.Module, strategy: str, device: torch.device, bf16: bool) -> nn.Module:
    """Bring `model`, the same on every rank, to `device`; returns what the loop calls in its place.

    FSDP shards every layer on its own and what is left of the model as one more, so that a device holds one layer
    whole at a time, from the start. With bf16 on GPUs the layers' weights travel in bfloat16, gradients in float32;
    which operation computes in what is left to autocast, as with DDP (on the CPU it knows no rounded norms, and weights
    travel in float32). Parameters without gradients (averages) are sharded the same way.
    """
    if dist.world_size() == 1 or strategy == "ddp":
        model.to(device)
        if dist.world_size() == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        return DistributedDataParallel(model, forward_sync_buffers=False, gradient_as_bucket_view=True)
    mesh = init_device_mesh(device.type, (dist.world_size(),))
    travel = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bf16 and device.type == "cuda" else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    for layer in layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=travel)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    return model  # changed in place


@contextmanager
def exchange(replica: nn.Module, last: bool) -> Iterator[None]:
    """Around forward and backward of a micro-batch: ranks exchange gradients once an update, with its last one."""
    if isinstance(replica, FSDPModule):
        replica.set_requires_gradient_sync(last)
    if isinstance(replica, DistributedDataParallel) and not last:
        with replica.no_sync():
            yield
    else:
        yield


def reshard(model: nn.Module) -> None:
    """Let go of what a forward pass without a backward pass has left whole: it would be out of date after an update."""
    if isinstance(model, FSDPModule):
        model.reshard()


def own(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank; it shares the memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def placed(whole: Tensor, like: Tensor) -> Tensor:
    """A whole tensor as `like` is laid out: this rank's shard, or all of it. Nothing is sent."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def host_copy(value: Any, keep: bool) -> Any:
    """A copy, in this host's memory, of dictionaries of tensors and numbers, every tensor whole.

    All ranks must call it at the same time with dictionaries of the same order. keep: whether this rank needs it; one
    that does not gets None in place of every tensor.
    """
    if isinstance(value, dict):
        return {key: host_copy(item, keep) for key, item in value.items()}
    if not isinstance(value, Tensor):
        return value
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.detach().to("cpu", copy=True) if keep else None


@contextmanager
def kernels(compute: ComputeParams) -> Iterator[None]:
    """How matrix products and attention are computed: float32 products in TF32 on GPUs only where that is asked for."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = compute.precision == "tf32"
    try:
        with nullcontext() if compute.fused_attention else sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
