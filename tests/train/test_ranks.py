"""One training, whatever shares the work: ranks, strategies, micro-batches, loader processes, and interruptions."""

import csv
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Record, samples_by_step, train_on
from safetensors.torch import load_file

from mdc.config import Params
from mdc.train import checkpoint
from mdc.train.pulse import MOST
from mdc.train.work import work_folder

MakeParams = Callable[..., Params]
# ranks, micro-batches, and how they compute
LAYOUTS: dict[str, list[tuple[int, int, dict[str, Any]]]] = {
    "mdc": [(1, 2, {"workers": 4}), (2, 2, {"workers": 1, "strategy": "fsdp"}), (4, 2, {})],
    "autoregressive": [(2, 4, {"strategy": "fsdp", "fused_optimizer": False})],
    "clip": [(2, 1, {}), (4, 1, {"strategy": "fsdp"})],
    "siglip": [(2, 1, {"strategy": "fsdp"})],
}
# at a low rate: AdamW makes much of the rounding of small gradients
SMALL = {"steps": 4, "lr": 0.001, "decoder_depth": 2, "ema_decay": 0.5, "validate_every": 2, "log_every": 2}


def curve(model: Path) -> list[dict[str, float]]:
    with (model / "loss.csv").open(newline="") as file:
        return [{name: float(cell) for name, cell in row.items() if cell} for row in csv.DictReader(file)]


def assert_same(model: Path, records: list[Record], whole: Path, alone: Record, tolerance: float = 1e-5) -> None:
    """Samples, rates, losses, gradients and weights are those of one process that takes each batch whole."""
    assert samples_by_step(records) == samples_by_step([alone])
    for record in records:
        assert record.rates == alone.rates
        assert record.norms == pytest.approx(alone.norms, rel=tolerance)
        for gradients, expected in zip(record.gradients, alone.gradients, strict=True):
            for number, gradient in expected.items():
                torch.testing.assert_close(gradients[number], gradient, atol=tolerance, rtol=0)
    assert len(curve(model)) == len(curve(whole)) > 0
    for row, wanted in zip(curve(model), curve(whole), strict=True):
        assert row == pytest.approx(wanted, rel=tolerance)
    weights, wanted_weights = load_file(model / checkpoint.WEIGHTS), load_file(whole / checkpoint.WEIGHTS)
    for name, tensor in wanted_weights.items():
        torch.testing.assert_close(weights[name], tensor, atol=tolerance, rtol=0)


@pytest.mark.parametrize("objective", LAYOUTS)
def test_no_layout_changes_a_training(tmp_path: Path, shards: Path, small_params: MakeParams, objective: str) -> None:
    """Captions have two or three words, so that a mean of means would differ."""

    def params(accumulate: int = 1, **compute: Any) -> Params:
        return small_params(**SMALL, objective=objective, accumulate=accumulate, compute=compute)

    (alone,) = train_on(1, params(), shards, tmp_path / "one", tmp_path / "runs")
    for number, (world, accumulate, compute) in enumerate(LAYOUTS[objective]):
        model, uncached = tmp_path / f"{number}", "workers" in compute
        layout = params(accumulate, **compute)
        records = train_on(world, layout, shards, model, tmp_path / "runs", uncached=uncached)
        assert_same(model, records, tmp_path / "one", alone)


@pytest.mark.parametrize("first", [("ddp", 2), ("fsdp", 2)])
def test_a_training_goes_on_with_other_ranks_and_the_other_strategy(
    tmp_path: Path, shards: Path, small_params: MakeParams, first: tuple[str, int]
) -> None:
    """4 + 3 + 3 updates against 10, the warm-up and an epoch ending within the first part; blocks are shuffled."""
    other = "fsdp" if first[0] == "ddp" else "ddp"
    common = {**SMALL, "steps": 10, "warmup_steps": 5, "accumulate": 2, "block_samples": 4}

    def params(strategy: str, workers: int) -> Params:
        return small_params(**common, compute={"strategy": strategy, "workers": workers})

    runs, model = tmp_path / "runs", tmp_path / "parts"
    (alone,) = train_on(1, params("ddp", 0), shards, tmp_path / "one", runs)
    parts = [
        train_on(2, params(first[0], 2), shards, model, runs, stop={0: 3, 1: 3}, uncached=True),
        train_on(2, params(other, 0), shards, model, runs, stop={0: 6}),
        train_on(1, params(other, 0), shards, model, runs),
    ]
    assert [record.exit for records in parts for record in records] == [128 + signal.SIGTERM] * 4 + [None]
    joined = Record()
    seen: dict[int, list[str]] = {}
    for records in parts:
        seen |= samples_by_step(records)
        joined.rates += records[0].rates
        joined.norms += records[0].norms
    assert len(joined.rates) == 10
    assert joined.rates == alone.rates
    assert seen == samples_by_step([alone])
    assert joined.norms == pytest.approx(alone.norms, rel=1e-5)
    assert len(curve(model)) == len(curve(tmp_path / "one")) == 5
    for row, wanted in zip(curve(model), curve(tmp_path / "one"), strict=True):
        assert row == pytest.approx(wanted, rel=1e-6)
    weights, wanted_weights = (load_file(folder / checkpoint.WEIGHTS) for folder in (model, tmp_path / "one"))
    for name, tensor in wanted_weights.items():
        torch.testing.assert_close(weights[name], tensor, atol=1e-5, rtol=0)


def test_a_signal_to_one_rank_stops_all_after_the_same_update_soon(
    tmp_path: Path, shards: Path, small_params: MakeParams
) -> None:
    """They agree far less often than after each update, and yet within so many as take no time."""
    params = small_params(steps=1000, log_every=1000, validate_every=1000, decoder_depth=1)
    records = train_on(2, params, shards, tmp_path / "model", tmp_path / "runs", stop={1: 100})
    assert [record.exit for record in records] == [128 + signal.SIGTERM] * 2
    updates = [len(record.rates) for record in records]
    assert updates[0] == updates[1]
    assert 101 <= updates[0] <= 101 + MOST
    assert all(record.asked < 50 for record in records)
    newest = checkpoint.step_folders(work_folder(params, shards, tmp_path / "runs"))[0]
    assert newest.name == f"step-{updates[0]:08d}"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
def test_shards_that_are_compiled_and_computed_again_give_the_same_training(
    tmp_path: Path, shards: Path, small_params: MakeParams
) -> None:
    (alone,) = train_on(1, small_params(**SMALL), shards, tmp_path / "one", tmp_path / "runs")
    for strategy in ("ddp", "fsdp"):
        compute = {"strategy": strategy, "compile": True, "activation_checkpointing": True}
        records = train_on(
            2, small_params(**SMALL, compute=compute), shards, tmp_path / strategy, tmp_path / "runs", patience_s=280
        )
        assert_same(tmp_path / strategy, records, tmp_path / "one", alone)


def test_shards_in_bfloat16_lose_no_more_than_the_whole_in_bfloat16(
    tmp_path: Path, shards: Path, small_params: MakeParams
) -> None:
    """Computing rounds; gradients and what is remembered stay in float32."""
    norms = {}
    for precision, strategy in (("fp32", "ddp"), ("bf16", "ddp"), ("bf16", "fsdp")):
        params = small_params(**SMALL, compute={"precision": precision, "strategy": strategy})
        model = tmp_path / f"{precision}-{strategy}"
        records = train_on(2, params, shards, model, tmp_path / "runs")
        norms[precision, strategy] = records[0].norms
        assert {tensor.dtype for tensor in load_file(model / checkpoint.WEIGHTS).values()} == {torch.float32}
        assert {gradient.dtype for gradient in records[0].gradients[0].values()} == {torch.float32}
    whole, shards_, exact = norms["bf16", "ddp"], norms["bf16", "fsdp"], norms["fp32", "ddp"]
    assert whole != exact
    assert whole == pytest.approx(exact, rel=0.05)
    assert shards_ == pytest.approx(whole, rel=0.02)
