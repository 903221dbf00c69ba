import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from mdc.config import PretrainParams
from mdc.train.optim import (
    build_optimizer,
    decayed,
    learning_rate,
    optimizer_state,
    restore_optimizer,
    scale_and_clip,
)
from mdc.train.strategy import host_copy


def test_learning_rate_rises_to_its_peak_and_falls_to_nothing() -> None:
    hyper = PretrainParams.model_validate({"steps": 100, "warmup_steps": 10, "lr": 0.5})
    rates = [learning_rate(step, hyper) for step in range(101)]
    assert rates[0] == pytest.approx(0.05)
    assert rates[9] == rates[10] == max(rates) == 0.5
    assert rates[55] == pytest.approx(0.25)  # half-way down
    assert rates[99] == pytest.approx(0.5 * 0.5 * (1 + math.cos(math.pi * 89 / 90)))
    assert rates[100] == pytest.approx(0)


def test_learning_rate_without_warmup_starts_at_its_peak() -> None:
    hyper = PretrainParams.model_validate({"steps": 10, "warmup_steps": 0, "lr": 0.5})
    assert learning_rate(0, hyper) == 0.5


@pytest.mark.parametrize("objective", ["mdc", "siglip"])
def test_weight_decay_leaves_out_norms_biases_embeddings_and_temperatures(
    tiny_model: Callable[..., Any], objective: str
) -> None:
    model = tiny_model(objective)
    names = decayed(model)
    sizes = {name: parameter.ndim for name, parameter in model.named_parameters()}
    assert any("attn" in name for name in names)
    assert any("mlp" in name or "fc" in name for name in names)
    assert all(sizes[name] >= 2 for name in names)
    assert not [name for name in names if "pos" in name or "bias" in name or "norm" in name or "embedding" in name]
    optimizer = build_optimizer(model, PretrainParams.model_validate({"weight_decay": 0.3}))
    decays = {group["weight_decay"]: len(group["params"]) for group in optimizer.param_groups}
    assert decays == {0.3: len(names), 0.0: len(sizes) - len(names)}


def test_gradients_are_scaled_and_then_clipped() -> None:
    weights = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    weights[0].grad, weights[1].grad = torch.tensor([6.0, 0.0]), torch.tensor([8.0])  # the third has none
    assert float(scale_and_clip(weights, torch.tensor(0.5), max_norm=1.0)) == pytest.approx(5)
    assert weights[0].grad.tolist() == pytest.approx([0.6, 0])
    assert weights[1].grad.tolist() == pytest.approx([0.8])
    assert float(scale_and_clip(weights, torch.tensor(0.5), max_norm=1.0)) == pytest.approx(0.5, rel=1e-4)
    assert weights[1].grad.tolist() == pytest.approx([0.4], rel=1e-4)


@pytest.mark.parametrize("fused", [True, False])
def test_adamw_goes_on_from_what_it_remembers_fused_or_not(tiny_model: Callable[..., Any], fused: bool) -> None:
    def update(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()

    hyper = PretrainParams.model_validate({})
    model = tiny_model("siglip")
    optimizer = build_optimizer(model, hyper, fused=True)
    update(model, optimizer, seed=0)
    remembered = host_copy(optimizer_state(optimizer), keep=True)
    other = copy.deepcopy(model)
    taken_up = build_optimizer(other, hyper, fused=fused)
    restore_optimizer(taken_up, remembered)
    assert taken_up.param_groups[0]["fused"] == fused
    update(model, optimizer, seed=1)
    update(other, taken_up, seed=1)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, atol=1e-6, rtol=0)
    assert remembered[0]["step"] == 1, "the copy is left as it was"
