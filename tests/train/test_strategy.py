import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.nn.attention import _cur_sdpa_kernel_backends

from mdc.config import ComputeParams, Params
from mdc.files import sha256
from mdc.model.decoder import SelfAttention
from mdc.train import strategy
from mdc.train.trainer import train

MakeParams = Callable[..., Params]
DROPPING = {"patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "drop_path_rate": 0.3, "proj_drop_rate": 0.2}


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry for each time that a layer of the decoder is computed."""
    calls: list[bool] = []
    forward = SelfAttention.forward

    def counted(self: SelfAttention, *arguments: Any) -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        return forward(self, *arguments)

    monkeypatch.setattr(SelfAttention, "forward", counted)
    return calls


def test_activations_that_are_computed_again_change_no_byte(
    tmp_path: Path, shards: Path, small_params: MakeParams, forwards: list[bool]
) -> None:
    """Layers and features drop at random, and drop the same the second time."""
    counts = []
    for again in (False, True):
        forwards.clear()
        compute = {"activation_checkpointing": again, "preflight": False}  # which passes through layers as well
        params = small_params(encoder_options=DROPPING, decoder_depth=2, compute=compute, ema_decay=0.9)
        train(params, shards, tmp_path / f"{again}", tmp_path / "runs")
        counts.append(sum(forwards))
    assert counts[1] == 2 * counts[0] > 0
    for name in ("model.safetensors", "loss.csv"):
        assert sha256(tmp_path / "True" / name) == sha256(tmp_path / "False" / name)


def test_plain_attention_and_plain_adamw_give_the_same_training(
    tmp_path: Path, shards: Path, small_params: MakeParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[tuple[bool, bool]] = []
    steps = torch.optim.AdamW.step

    def step(self: torch.optim.AdamW, *arguments: Any) -> Any:
        used.append((self.defaults["fused"], len(_cur_sdpa_kernel_backends()) > 1))
        return steps(self, *arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    for fused in (True, False):
        compute = {"fused_attention": fused, "fused_optimizer": fused}
        train(small_params(compute=compute), shards, tmp_path / f"{fused}", tmp_path / "runs")
    assert used == [(True, True)] * 8 + [(False, False)] * 8
    weights, plain = (load_file(tmp_path / f"{fused}" / "model.safetensors") for fused in (True, False))
    for name, tensor in weights.items():
        torch.testing.assert_close(plain[name], tensor, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("precision", "expected"), [("fp32", False), ("tf32", True), ("bf16", False)])
def test_float32_products_are_exact_unless_tf32_is_asked_for(precision: str, expected: bool) -> None:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    with strategy.kernels(ComputeParams.model_validate({"precision": precision})):
        assert torch.backends.cuda.matmul.allow_tf32 == torch.backends.cudnn.allow_tf32 == expected
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == before


def test_attention_is_taken_apart_only_where_that_is_asked_for() -> None:
    q = torch.randn(1, 1, 4, 8)
    with strategy.kernels(ComputeParams.model_validate({"fused_attention": False})):
        assert [backend.name for backend in _cur_sdpa_kernel_backends()] == ["MATH"]
        plain = F.scaled_dot_product_attention(q, q, q)
    assert len(_cur_sdpa_kernel_backends()) > 1
    torch.testing.assert_close(F.scaled_dot_product_attention(q, q, q), plain)


def test_a_copy_on_the_host_does_not_change_with_its_source() -> None:
    weight = nn.Parameter(torch.ones(2))
    copied = strategy.host_copy({"a": {"b": weight}, "n": 3}, keep=True)
    with torch.no_grad():
        weight.zero_()
    assert copied["a"]["b"].tolist() == [1, 1]
    assert not copied["a"]["b"].requires_grad
    assert copied["n"] == 3
    assert strategy.host_copy({"a": weight}, keep=False) == {"a": None}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
def test_compiled_layers_give_the_same_training(tmp_path: Path, shards: Path, small_params: MakeParams) -> None:
    for compile_ in (False, True):
        compute = {"compile": compile_, "activation_checkpointing": compile_}
        train(small_params(compute=compute, decoder_depth=2), shards, tmp_path / f"{compile_}", tmp_path / "runs")
    weights, compiled = (load_file(tmp_path / f"{compile_}" / "model.safetensors") for compile_ in (False, True))
    for name, tensor in weights.items():
        torch.testing.assert_close(compiled[name], tensor, atol=1e-5, rtol=0)
