"""Updates without a finite loss: left out by all ranks together, told, counted over restarts, and limited."""

import itertools
import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mdc.config import Params
from mdc.data.loader import ShardDataset
from mdc.errors import TrainingFailed
from mdc.train import launch
from mdc.train.optim import build_optimizer
from mdc.train.trainer import Trainer, train
from mdc.train.watch import Guard

MakeParams = Callable[..., Params]
HERE = Path(__file__).parent


@pytest.fixture
def bad_at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """`bad_at(2, 5)`: the pictures of steps 2 and 5 are not numbers. Returns the uids, filled while training."""
    augmented = Trainer._augmented

    def arrange(*steps: int) -> list[str]:
        uids: list[str] = []

        def broken(trainer: Trainer, batch: Any) -> Any:
            inputs = augmented(trainer, batch)
            if batch.step in steps:
                inputs.images_BCHW[0] = torch.nan
                uids.extend(batch.uids)
            return inputs

        monkeypatch.setattr(Trainer, "_augmented", broken)
        return uids

    return arrange


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`without(2)`: step 2 has no update."""
    update = Trainer._update

    def arrange(step: int) -> None:
        def absent(trainer: Trainer, left_out: Tensor) -> None:
            if trainer.done == step:
                trainer.optimizer.zero_grad(set_to_none=True)
            else:
                update(trainer, left_out)

        monkeypatch.setattr(Trainer, "_update", absent)

    return arrange


def weights(model: Path) -> dict[str, Tensor]:
    return load_file(model / "model.safetensors")


@pytest.mark.parametrize("ema_decay", [0.0, 0.5])
def test_an_update_that_is_left_out_is_as_if_its_batch_had_not_happened(
    tmp_path: Path,
    shards: Path,
    small_params: MakeParams,
    bad_at: Callable[..., list[str]],
    without: Callable[[int], None],
    caplog: pytest.LogCaptureFixture,
    ema_decay: float,
) -> None:
    params = small_params(skip_nonfinite=1, ema_decay=ema_decay, log_every=4)
    uids = bad_at(2)
    train(params, shards, tmp_path / "left-out", tmp_path / "runs")
    (told,) = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert told.startswith("step 2: ")
    assert "train-0000" in told
    assert "1 of at most 1" in told
    assert all(uid in told for uid in uids)
    bad_at()
    without(2)
    train(params, shards, tmp_path / "reference", tmp_path / "runs")
    expected = weights(tmp_path / "reference")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(tmp_path / "left-out").items())
    rows = (tmp_path / "left-out" / "loss.csv").read_text().splitlines()
    assert "nan" not in "".join(rows)


def test_two_ranks_leave_out_the_same_update(
    tmp_path: Path,
    shards: Path,
    small_params: MakeParams,
    without: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The loss of rank 1 alone is not finite."""
    monkeypatch.setattr(launch, "TARGET", "faulty")
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=":")
    monkeypatch.setenv("FAULT", "1:2:nan")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    params = small_params(skip_nonfinite=1, ema_decay=0.5, compute={"processes": 2})
    launch.pretrain(params, shards, tmp_path / "left-out", tmp_path / "runs")
    assert "step 2: the loss or its gradient is not finite; this update is left out" in capfd.readouterr().err
    without(2)
    train(params, shards, tmp_path / "reference", tmp_path / "runs")
    expected = weights(tmp_path / "reference")
    for name, tensor in weights(tmp_path / "left-out").items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-5)
    monkeypatch.setenv("FAULT", "1:2:nan")
    with pytest.raises(TrainingFailed, match=r"FloatingPointError: step 2: .* stopped before the update\."):
        launch.pretrain(small_params(compute={"processes": 2}), shards, tmp_path / "stopped", tmp_path / "runs")


def test_the_limit_holds_over_restarts(
    tmp_path: Path,
    shards: Path,
    small_params: MakeParams,
    bad_at: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bad_at(1, 5)
    gradients = Trainer._gradients

    def stopped_at_3(trainer: Trainer, batches: Any) -> Any:
        if trainer.done == 3:
            signal.raise_signal(signal.SIGTERM)
        return gradients(trainer, batches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_gradients", stopped_at_3)
        with pytest.raises(SystemExit):
            train(small_params(skip_nonfinite=1), shards, tmp_path / "model", tmp_path / "runs")
    with pytest.raises(FloatingPointError, match=r"step 5: .* after 1 that were left out\. The batch"):
        train(small_params(skip_nonfinite=1), shards, tmp_path / "model", tmp_path / "runs")
    train(small_params(skip_nonfinite=2), shards, tmp_path / "model", tmp_path / "runs")
    assert (tmp_path / "model" / "manifest.json").is_file(), "a higher limit takes the same training up again"


def test_where_the_host_learns_late_nothing_past_the_limit_is_updated(
    shards: Path, small_params: MakeParams, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a GPU: the host looks after five updates, of which 1 and 3 are bad and one may be left out."""
    layer = torch.nn.Linear(2, 2)
    optimizer = build_optimizer(layer, small_params().pretrain)
    dataset = ShardDataset(shards, "train")
    guard = Guard(optimizer, dataset, torch.device("cpu"), limit=1)
    seen = [layer.weight.detach().clone()]
    with monkeypatch.context() as patch:
        patch.setattr(guard, "check", lambda: None)
        for step in range(5):
            for parameter in layer.parameters():
                parameter.grad = torch.ones_like(parameter)
            loss = torch.tensor(torch.inf if step in (1, 3) else 1.0)
            left_out = guard.judge(step, torch.stack([loss, torch.ones(())]), torch.ones(()), [(["u001"], loss)])
            assert left_out.item() == (step in (1, 3, 4))
            optimizer.step()
            seen.append(layer.weight.detach().clone())
    changed = [not torch.equal(one, other) for one, other in itertools.pairwise(seen)]
    assert changed == [True, False, True, False, False]
    with caplog.at_level(logging.WARNING), pytest.raises(FloatingPointError, match="step 3"):
        guard.check()
    assert "step 1: " in caplog.text
