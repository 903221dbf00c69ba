"""AdamW, its schedule, and the clipping of gradients."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mdc import dist
from mdc.config import PretrainParams
from mdc.train.strategy import own, placed


def decayed(model: nn.Module) -> set[str]:
    """The names of the parameters that weight decay applies to: matrices and filters, but no embedding.

    Norms, biases and temperatures have a scale of their own, and a row of an embedding that is seen rarely would be
    shrunk at every step in between.
    """
    embeddings = {
        f"{place}.{name}"
        for place, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        for name, _ in module.named_parameters(recurse=False)
    }
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim >= 2 and name not in embeddings and "pos" not in name.rsplit(".", 1)[-1]
    }


def build_optimizer(model: nn.Module, hyper: PretrainParams, fused: bool = True) -> torch.optim.AdamW:
    """AdamW with betas (0.9, beta2). The fused one alone can leave out an update without asking the host."""
    names = decayed(model)
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in parameters if name in names], "weight_decay": hyper.weight_decay},
        {"params": [p for name, p in parameters if name not in names], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=hyper.lr, betas=(0.9, hyper.beta2), fused=fused, foreach=not fused)


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Tensor]]:
    """What the optimiser remembers of each parameter, by its number, as it is laid out over ranks."""
    return optimizer.state_dict()["state"]


def restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[int, dict[str, Tensor]]) -> None:
    """Take up `optimizer_state`, of whole tensors. Options such as `fused` stay as they are now."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    laid_out = {
        number: {
            name: (value if value.ndim == 0 else placed(value, parameters[number])).clone()
            for name, value in values.items()
        }
        for number, values in state.items()
    }
    optimizer.load_state_dict({"state": laid_out, "param_groups": optimizer.state_dict()["param_groups"]})


def learning_rate(step: int, hyper: PretrainParams) -> float:
    """The rate of update `step` (from 0): a linear rise over the warm-up, then half a cosine down to 0 at `steps`."""
    if step < hyper.warmup_steps:
        return hyper.lr * (step + 1) / hyper.warmup_steps
    progress = (step - hyper.warmup_steps) / (hyper.steps - hyper.warmup_steps)
    return hyper.lr * 0.5 * (1 + math.cos(math.pi * progress))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def scale_and_clip(parameters: Iterable[nn.Parameter], scale: Tensor, max_norm: float) -> Tensor:
    """Multiply the gradients by `scale`, then shrink them to a global norm of at most `max_norm`.

    Shards of gradients count together over all ranks. Returns the norm before it was shrunk, as a tensor on the device:
    reading it would wait for the device.
    """
    laid_out = [parameter.grad for parameter in parameters if parameter.grad is not None]
    gradients = [own(gradient) for gradient in laid_out]
    norm = nn.utils.get_total_norm(gradients)
    if any(isinstance(gradient, DTensor) for gradient in laid_out):
        norm = dist.all_reduce_sum(norm.square()).sqrt()
    norm = norm * scale
    torch._foreach_mul_(gradients, scale * (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
