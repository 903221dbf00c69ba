import csv
import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mdc import dist
from mdc.config import Params
from mdc.errors import UserError
from mdc.files import read_json, sha256
from mdc.train import checkpoint
from mdc.train.trainer import Trainer, train
from mdc.train.work import work_folder

MakeParams = Callable[..., Params]
MakeShards = Callable[..., Path]


def curve(model: Path) -> list[dict[str, float]]:
    """The rows of a loss curve; cells without a number are left out."""
    with (model / "loss.csv").open(newline="") as file:
        return [{name: float(cell) for name, cell in row.items() if cell} for row in csv.DictReader(file)]


def assert_same_curve(one: Path, other: Path, tolerance: float) -> None:
    assert len(curve(one)) == len(curve(other)) > 0
    for row, expected in zip(curve(one), curve(other), strict=True):
        assert row == pytest.approx(expected, rel=tolerance)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[str]]]:
    """(step, uids) of every batch that is trained on."""
    batches: list[tuple[int, list[str]]] = []
    augmented = Trainer._augmented

    def note(trainer: Trainer, batch: Any) -> Any:
        batches.append((batch.step, batch.uids))
        return augmented(trainer, batch)

    monkeypatch.setattr(Trainer, "_augmented", note)
    return batches


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`stop_after(n)`: SIGTERM arrives in the n-th step that is trained from now on."""
    gradients = Trainer._gradients

    def arrange(steps: int) -> None:
        count = 0

        def counted(trainer: Trainer, batches: Any) -> Any:
            nonlocal count
            count += 1
            if count == steps:
                signal.raise_signal(signal.SIGTERM)
            return gradients(trainer, batches)

        monkeypatch.setattr(Trainer, "_gradients", counted)

    return arrange


def test_training_writes_a_model_and_its_curve_and_leaves_nothing_behind(
    tmp_path: Path, shards: Path, small_params: MakeParams
) -> None:
    output, runs = tmp_path / "model", tmp_path / "runs"
    train(small_params(), shards, output, runs)
    rows = curve(output)
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert [row["images"] for row in rows] == list(range(8, 65, 8))
    assert [row["step"] for row in rows if "validation_loss" in row] == [4, 8]
    assert rows[-1]["train_loss"] < rows[0]["train_loss"]
    manifest = read_json(output / "manifest.json")
    assert manifest["counts"] == {"steps": 8, "images": 64, "passes": pytest.approx(64 / 36, abs=1e-3)}
    assert manifest["inputs"]["shards"] == sha256(shards / "manifest.json")
    assert checkpoint.load_model(output).fingerprint == manifest["fingerprint"]
    assert [path.name for path in runs.iterdir()] == ["cost.json"]
    cost = read_json(runs / "cost.json")
    assert (cost["fingerprint"], cost["images"], cost["ranks"]) == (manifest["fingerprint"], 64, 1)
    assert cost["seconds"] > 0
    assert round(64 / cost["images_per_s"], 3) == cost["seconds"]
    assert sum(cost["time"].values()) == pytest.approx(1, abs=0.01)


def test_the_same_training_gives_the_same_bytes(tmp_path: Path, shards: Path, small_params: MakeParams) -> None:
    for name in ("one", "two"):
        train(small_params(ema_decay=0.5), shards, tmp_path / name, tmp_path / "runs")
    for file in sorted((tmp_path / "one").iterdir()):
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes(), file.name


def test_another_seed_gives_another_training(tmp_path: Path, shards: Path, small_params: MakeParams) -> None:
    for seed in (0, 1):
        train(small_params(seed=seed, steps=4), shards, tmp_path / f"{seed}", tmp_path / "runs")
    assert curve(tmp_path / "0")[0]["train_loss"] != curve(tmp_path / "1")[0]["train_loss"]


@pytest.mark.parametrize("objective", ["mdc", "bert", "cappa"])
def test_micro_batches_change_no_loss(tmp_path: Path, shards: Path, small_params: MakeParams, objective: str) -> None:
    """Captions have two or three words, so that a mean of means would differ."""
    for parts in (1, 8):
        train(small_params(objective=objective, accumulate=parts), shards, tmp_path / f"{parts}", tmp_path / "runs")
    assert_same_curve(tmp_path / "8", tmp_path / "1", tolerance=1e-5)


@pytest.mark.parametrize("options", [{}, {"ema_decay": 0.9, "accumulate": 2, "log_every": 3}])
def test_a_stopped_training_continues_as_if_nothing_had_happened(
    tmp_path: Path,
    shards: Path,
    small_params: MakeParams,
    seen: list[tuple[int, list[str]]],
    stop_after: Callable[[int], None],
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
) -> None:
    params = small_params(**options)
    train(params, shards, tmp_path / "straight", tmp_path / "runs")
    straight = seen.copy()
    seen.clear()
    for steps in (2, 3):
        stop_after(steps)
        with pytest.raises(SystemExit) as stopped:
            train(params, shards, tmp_path / "resumed", tmp_path / "runs")
        assert stopped.value.code == 128 + signal.SIGTERM
    assert not (tmp_path / "resumed").exists()
    with caplog.at_level(logging.INFO):
        train(params, shards, tmp_path / "resumed", tmp_path / "runs")
    assert "taken up again at step 5 of 8" in caplog.text
    assert seen == straight
    assert_same_curve(tmp_path / "resumed", tmp_path / "straight", tolerance=1e-6)
    assert sha256(tmp_path / "resumed/model.safetensors") == sha256(tmp_path / "straight/model.safetensors")


def test_a_damaged_newest_checkpoint_costs_only_the_steps_since_the_one_before(
    tmp_path: Path,
    shards: Path,
    small_params: MakeParams,
    stop_after: Callable[[int], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    params = small_params(checkpoint_every=2)
    train(params, shards, tmp_path / "straight", tmp_path / "runs")
    stop_after(5)
    with pytest.raises(SystemExit):
        train(params, shards, tmp_path / "resumed", tmp_path / "runs")
    newest, before = checkpoint.step_folders(work_folder(params, shards, tmp_path / "runs"))
    assert (newest.name, before.name) == ("step-00000005", "step-00000004")
    (newest / "model.safetensors").write_bytes(b"")
    with caplog.at_level(logging.INFO):
        train(params, shards, tmp_path / "resumed", tmp_path / "runs")
    assert "step-00000005 is damaged" in caplog.text
    assert "taken up again at step 4" in caplog.text
    assert_same_curve(tmp_path / "resumed", tmp_path / "straight", tolerance=1e-6)


@pytest.mark.parametrize(("minutes", "expected"), [(0.0, [3, 4, 6, 8]), (1e-9, [1, 2, 3, 4, 5, 6, 7, 8])])
def test_checkpoints_come_by_steps_and_by_the_clock_and_some_stay_for_good(
    tmp_path: Path,
    shards: Path,
    small_params: MakeParams,
    monkeypatch: pytest.MonkeyPatch,
    minutes: float,
    expected: list[int],
) -> None:
    saved: list[int] = []
    save = checkpoint.Store.save

    def noted(store: checkpoint.Store, snapshot: checkpoint.Snapshot) -> Path:
        saved.append(snapshot.step)
        return save(store, snapshot)

    monkeypatch.setattr(checkpoint.Store, "save", noted)
    params = small_params(checkpoint_every=4, keep_every=3, checkpoint_minutes=minutes)
    train(params, shards, tmp_path / "model", tmp_path / "runs")
    assert saved == expected
    (kept,) = (tmp_path / "runs").glob("kept-*")
    assert [folder.name for folder in checkpoint.step_folders(kept)] == ["step-00000006", "step-00000003"]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["cost.json", kept.name]


def test_other_data_or_parameters_start_afresh_and_say_so(
    tmp_path: Path,
    shards: Path,
    small_params: MakeParams,
    stop_after: Callable[[int], None],
    caplog: pytest.LogCaptureFixture,
    make_shards: MakeShards,
) -> None:
    params, runs = small_params(), tmp_path / "runs"
    changed = [
        (params, make_shards(tmp_path / "other", seed=1)),
        (small_params(lr=0.02), shards),
        (small_params(objective="bert"), shards),
    ]
    folders = {work_folder(some, data, runs) for some, data in [(params, shards), *changed]}
    assert len(folders) == 4
    assert work_folder(small_params(checkpoint_every=3, compute={"processes": 2}), shards, runs) in folders
    stop_after(3)
    with pytest.raises(SystemExit):
        train(params, shards, tmp_path / "model", runs)
    kept = work_folder(params, shards, runs)
    for some, data in changed:
        caplog.clear()
        with caplog.at_level(logging.INFO):
            train(some, data, tmp_path / "model", runs)
        assert "from step 0 of 8" in caplog.text
        assert f"{kept} are left over from other data or parameters" in caplog.text
    assert checkpoint.newest_checkpoint(kept) is not None


def test_a_loss_that_is_not_finite_stops_before_the_update(
    tmp_path: Path, shards: Path, small_params: MakeParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second half of the batch of step 3 goes bad; the weights that are left are those after step 2."""
    augmented, weights, bad = Trainer._augmented, {}, []

    def broken(trainer: Trainer, batch: Any) -> Any:
        inputs = augmented(trainer, batch)
        if batch.step == 3:
            weights.update({name: tensor.clone() for name, tensor in trainer.model.state_dict().items()})
            weights["trainer"] = trainer
            if batch.first == 4:
                inputs.images_BCHW[1] = torch.nan
                bad.extend(batch.uids)
        return inputs

    monkeypatch.setattr(Trainer, "_augmented", broken)
    with pytest.raises(FloatingPointError, match=r"step 3: .* not finite") as failure:
        train(small_params(accumulate=2), shards, tmp_path / "model", tmp_path / "runs")
    assert all(uid in str(failure.value) for uid in bad)
    assert len(bad) == 4
    assert "train-0000" in str(failure.value)
    trainer = weights.pop("trainer")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in trainer.model.state_dict().items())
    assert not (tmp_path / "model").exists()


def test_what_is_delivered_and_validated_is_the_average(
    tmp_path: Path, shards: Path, small_params: MakeParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """decay 0.9: average = 0.9 * average + 0.1 * weights, from the initial weights on."""
    steps: list[dict[str, torch.Tensor]] = []
    update = Trainer._update

    def noted(trainer: Trainer, left_out: torch.Tensor) -> None:
        if not steps:
            start = checkpoint.initial_model(trainer.config, trainer.hyper.seed)
            steps.append({name: tensor.clone() for name, tensor in start.named_parameters()})
        update(trainer, left_out)
        weights = dict(trainer.model.named_parameters())
        steps.append({name: 0.9 * old + 0.1 * weights[name].detach() for name, old in steps[-1].items()})

    monkeypatch.setattr(Trainer, "_update", noted)
    train(small_params(ema_decay=0.9), shards, tmp_path / "model", tmp_path / "runs")
    delivered = checkpoint.load_model(tmp_path / "model").model
    for name, parameter in delivered.named_parameters():
        torch.testing.assert_close(parameter, steps[-1][name])


def test_validation_sees_the_same_corruption_every_time_and_at_most_so_many_images(
    tmp_path: Path, shards: Path, small_params: MakeParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = []
    validate = Trainer.validate

    def twice(trainer: Trainer) -> float | None:
        losses.append((validate(trainer), validate(trainer)))
        return losses[-1][0]

    monkeypatch.setattr(Trainer, "validate", twice)
    train(small_params(steps=4), shards, tmp_path / "all", tmp_path / "runs")
    train(small_params(steps=4, validation_images=5), shards, tmp_path / "five", tmp_path / "runs")
    assert all(first == second for first, second in losses)
    assert losses[0][0] != losses[1][0]


def test_training_without_a_validation_split_leaves_the_column_empty(
    tmp_path: Path, small_params: MakeParams, make_shards: MakeShards
) -> None:
    train(small_params(), make_shards(tmp_path, validation=False), tmp_path / "model", tmp_path / "runs")
    assert not [row for row in curve(tmp_path / "model") if "validation_loss" in row]


def test_missing_shards_are_named_with_the_stage_that_makes_them(tmp_path: Path, small_params: MakeParams) -> None:
    with pytest.raises(UserError, match="mdc stage shard"):
        train(small_params(), tmp_path / "nothing", tmp_path / "model", tmp_path / "runs")


def test_captions_longer_than_the_decoder_are_refused(tmp_path: Path, shards: Path, small_params: MakeParams) -> None:
    params = small_params()
    params = params.model_copy(update={"caption": params.caption.model_copy(update={"max_tokens": 3})})
    with pytest.raises(UserError, match=r"4 tokens but caption\.max_tokens is 3"):
        train(params, shards, tmp_path / "model", tmp_path / "runs")


def test_damaged_shards_are_found_before_the_first_step(
    tmp_path: Path, small_params: MakeParams, make_shards: MakeShards
) -> None:
    shards = make_shards(tmp_path)
    shard = shards / "train-00001.tar"
    shard.write_bytes(shard.read_bytes()[:-1024] + bytes([1]) * 1024)
    with pytest.raises(UserError, match=r"train-00001\.tar"):
        train(small_params(), shards, tmp_path / "model", tmp_path / "runs")


def test_signal_handlers_are_put_back(tmp_path: Path, shards: Path, small_params: MakeParams) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    train(small_params(steps=4), shards, tmp_path / "model", tmp_path / "runs")
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert not dist.is_initialized()


def test_a_share_of_the_data_is_all_that_is_trained_on(tmp_path: Path, shards: Path, small_params: MakeParams) -> None:
    train(small_params(data_share=0.25, steps=9, batch_size=4), shards, tmp_path / "model", tmp_path / "runs")
    assert read_json(tmp_path / "model" / "manifest.json")["counts"]["passes"] == pytest.approx(4)  # 36 images, 9 pairs
