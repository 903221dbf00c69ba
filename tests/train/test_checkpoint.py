import logging
import os
import resource
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mdc import files
from mdc.errors import UserError
from mdc.train import checkpoint

MakeStore = Callable[..., checkpoint.Store]
MakeSnapshot = Callable[[int], checkpoint.Snapshot]
MakeFull = Callable[[Callable[[], None], int], list[str]]


@pytest.fixture
def parts(tiny_config: Callable[..., Any], shards: Path) -> dict[str, Any]:
    """What `save_model` writes."""
    config = tiny_config()
    model = checkpoint.initial_model(config, seed=1)
    return {"model": model, "config": config, "tokenizer_path": shards / "tokenizer.json"}


@pytest.fixture
def store(tmp_path: Path, parts: dict[str, Any]) -> Callable[..., checkpoint.Store]:
    """`store(keep=2, **options)`: a store in the test's own folder."""

    def make(keep: int = 2, **options: Any) -> checkpoint.Store:
        return checkpoint.Store(tmp_path / "work", parts["config"], parts["tokenizer_path"], keep, **options)

    return make


@pytest.fixture
def snapshot(parts: dict[str, Any]) -> Callable[[int], checkpoint.Snapshot]:
    """`snapshot(step)`: a training at that step."""
    state = {"optimizer": {0: {"step": torch.tensor(3.0), "exp_avg": torch.rand(5)}}, "averaged": None}
    progress = {"history": [{"lr": 0.1}]}
    return lambda step: checkpoint.Snapshot(step, parts["model"].state_dict(), state, {"step": step, **progress})


def save_model(folder: Path, parts: dict[str, Any]) -> Path:
    folder.mkdir()
    checkpoint.save_model(folder, parts["model"], parts["config"], parts["tokenizer_path"])
    return folder


def test_a_model_is_rebuilt_from_its_folder_alone(tmp_path: Path, parts: dict[str, Any]) -> None:
    loaded = checkpoint.load_model(save_model(tmp_path / "model", parts))
    assert loaded.config == parts["config"]
    assert loaded.tokenizer.vocabulary.size > 5
    assert not loaded.model.training
    saved = parts["model"].state_dict()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in loaded.model.state_dict().items())
    again = save_model(tmp_path / "again", parts)
    for file in sorted((tmp_path / "model").iterdir()):
        assert file.read_bytes() == (again / file.name).read_bytes()
    assert checkpoint.fingerprint(again) == loaded.fingerprint


def test_the_fingerprint_follows_the_weights(tmp_path: Path, parts: dict[str, Any]) -> None:
    before = checkpoint.fingerprint(save_model(tmp_path / "before", parts))
    with torch.no_grad():
        next(parts["model"].parameters()).add_(1)
    assert checkpoint.fingerprint(save_model(tmp_path / "after", parts)) != before


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape", "half", "gone"])
def test_weights_that_do_not_fit_are_refused(tmp_path: Path, parts: dict[str, Any], change: str) -> None:
    folder = save_model(tmp_path / "model", parts)
    path = folder / checkpoint.WEIGHTS
    weights = load_file(path)
    name = next(iter(weights))
    if change == "missing":
        save_file({key: value for key, value in weights.items() if key != name}, path)
    elif change == "unexpected":
        save_file({**weights, "more": torch.zeros(1)}, path)
    elif change == "shape":
        save_file({**weights, name: weights[name][..., :-1].contiguous()}, path)
    elif change == "half":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    else:
        path.unlink()
    with pytest.raises(UserError, match="does not hold the weights"):
        checkpoint.load_model(folder)


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no checkpoint.*config\.json"):
        checkpoint.load_model(tmp_path)


def test_an_untrained_model_depends_on_its_seed_and_on_nothing_else(tiny_config: Callable[..., Any]) -> None:
    config = tiny_config(encoder_pretrained=True)  # no weights are fetched for it
    torch.manual_seed(5)
    one = checkpoint.untrained_model(config, seed=1).state_dict()
    after = torch.rand(1)
    two = checkpoint.untrained_model(config, seed=1).state_dict()
    other = checkpoint.untrained_model(config, seed=2).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(1)), "building a model must leave the global generator alone"


def test_a_checkpoint_of_a_training_gives_back_what_was_saved(
    parts: dict[str, Any], store: MakeStore, snapshot: MakeSnapshot
) -> None:
    saved = snapshot(3)
    folder = store().save(saved)
    model = checkpoint.initial_model(parts["config"], seed=2)
    state, progress = checkpoint.load_checkpoint(folder, model)
    assert progress == saved.progress
    assert torch.equal(state["optimizer"][0]["exp_avg"], saved.state["optimizer"][0]["exp_avg"])
    assert all(torch.equal(tensor, saved.weights[name]) for name, tensor in model.state_dict().items())


def names(work: Path) -> list[int]:
    return [int(folder.name.removeprefix("step-")) for folder in checkpoint.step_folders(work)]


def test_only_the_newest_checkpoints_are_kept(store: MakeStore, snapshot: MakeSnapshot) -> None:
    for step in (5, 10, 15, 100):
        store(keep=2).save(snapshot(step))
    assert names(store().work) == [100, 15]


def test_every_so_many_steps_one_is_kept_for_good(
    tmp_path: Path, store: MakeStore, snapshot: MakeSnapshot, parts: dict[str, Any]
) -> None:
    kept = store(keep=1, keep_every=10)
    for step in (5, 10, 15, 20, 25, 30, 33):
        kept.save(snapshot(step))
    assert names(kept.work) == [33, 30, 20, 10]
    kept.close()
    assert [path.name for path in tmp_path.iterdir()] == ["kept-work"]
    assert names(tmp_path / "kept-work") == [30, 20, 10]
    assert checkpoint.load_model(tmp_path / "kept-work" / "step-00000020").config == parts["config"]


def test_a_training_that_is_over_leaves_nothing_else(tmp_path: Path, store: MakeStore, snapshot: MakeSnapshot) -> None:
    store().save(snapshot(5))
    store().close()
    assert list(tmp_path.iterdir()) == []


def test_damaged_checkpoints_go_with_the_first_good_one_and_count_for_nothing(
    store: MakeStore, snapshot: MakeSnapshot
) -> None:
    folders = [store(keep=3).save(snapshot(step)) for step in (2, 4, 6)]
    for folder in folders[1:]:
        (folder / checkpoint.STATE).write_bytes(b"")
    assert checkpoint.newest_checkpoint(store().work) == folders[0]
    again = store(keep=2, damaged=frozenset(folders[1:]))
    again.save(snapshot(6))  # in the place of a damaged one
    assert names(again.work) == [6, 2]
    assert checkpoint.newest_checkpoint(again.work) == folders[2]


@pytest.mark.parametrize("file", [checkpoint.WEIGHTS, checkpoint.STATE, checkpoint.PROGRESS, "manifest.json"])
@pytest.mark.parametrize("damage", ["half", "empty", "gone", "changed"])
def test_a_damaged_checkpoint_is_passed_over_aloud(
    store: MakeStore, snapshot: MakeSnapshot, caplog: pytest.LogCaptureFixture, file: str, damage: str
) -> None:
    good = store().save(snapshot(5))
    path = store().save(snapshot(10)) / file
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    elif damage == "changed":
        path.write_bytes(content[:-2] + bytes([content[-2] ^ 1, content[-1] ^ 1]))
    else:
        path.write_bytes(content[: len(content) // 2] if damage == "half" else b"")
    with caplog.at_level(logging.WARNING):
        assert checkpoint.newest_checkpoint(store().work) == good
    assert "step-00000010 is damaged" in caplog.text
    assert path.parent.is_dir(), "nothing is removed"


def test_what_does_not_read_back_does_not_appear(
    store: MakeStore, snapshot: MakeSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that loses what it was given: the older checkpoint stays, and no damaged one appears."""
    good = store(keep=1).save(snapshot(1))

    write_manifest = files.write_manifest

    def manifest(folder: Path, **more: Any) -> Any:
        made = write_manifest(folder, **more)
        (folder / checkpoint.STATE).write_bytes(b"\0" * (folder / checkpoint.STATE).stat().st_size)
        return made

    monkeypatch.setattr(files, "write_manifest", manifest)
    with pytest.raises(OSError, match="does not read back"):
        store(keep=1).save(snapshot(2))
    assert checkpoint.step_folders(store().work) == [good]
    assert checkpoint.newest_checkpoint(store().work) == good


def in_child(work: Callable[[], None]) -> int:
    """The id of a forked process that does `work`."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


def test_a_kill_at_any_moment_leaves_a_good_checkpoint(
    parts: dict[str, Any], store: MakeStore, snapshot: MakeSnapshot
) -> None:
    def save_for_ever(step: int) -> None:
        while True:
            step += 1
            store(keep=1).save(snapshot(step))

    folder = store(keep=1).save(snapshot(1))
    for attempt in range(20):
        pid = in_child(partial(save_for_ever, int(folder.name.removeprefix("step-"))))
        time.sleep(0.03 + 0.007 * attempt)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        newest = checkpoint.newest_checkpoint(store().work)
        assert newest is not None
        assert newest >= folder
        folder = newest
        assert checkpoint.load_checkpoint(folder, parts["model"])[1]["history"] == [{"lr": 0.1}]


@pytest.fixture
def full_after(tmp_path: Path) -> MakeFull:
    """`full_after(work, n)`: what `work` logs and raises in a child that can write no file of more than n bytes."""

    def run(work: Callable[[], None], limit: int) -> list[str]:
        told = tmp_path / "told"

        def limited() -> None:
            lines: list[str] = []
            handler = logging.Handler()
            handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
            logging.getLogger("mdc").addHandler(handler)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            try:
                work()
            except OSError as error:
                lines.append(f"raised: {error}")
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            told.write_text("\n".join(lines))

        os.waitpid(in_child(limited), 0)
        return told.read_text().splitlines()

    return run


@pytest.mark.parametrize("room", ["for no file", "for all but the state"])
def test_a_full_disk_costs_one_checkpoint_then_the_training_and_never_an_older_checkpoint(
    store: MakeStore, snapshot: MakeSnapshot, full_after: MakeFull, room: str
) -> None:
    good = store(keep=1).save(snapshot(1))
    weights = (good / checkpoint.WEIGHTS).stat().st_size
    limit = weights // 2
    if room == "for all but the state":
        limit = 2 * weights
        snapshot(2).state["averaged"] = {"more": torch.zeros(weights)}  # four bytes each

    def write() -> None:
        writer = checkpoint.Writer(store(keep=1))
        for step in (2, 3, 4):
            writer.start(snapshot(step))
        writer.wait()

    lines = full_after(write, limit)
    assert len(lines) == 2, lines
    assert "checkpoint of step 2 could not be written" in lines[0]
    assert lines[1].startswith("raised: two checkpoints in a row")
    assert checkpoint.step_folders(store().work) == [good]
    assert checkpoint.newest_checkpoint(store().work) == good


def test_a_training_that_stops_needs_its_last_checkpoint(
    store: MakeStore, snapshot: MakeSnapshot, full_after: MakeFull
) -> None:
    def write() -> None:
        writer = checkpoint.Writer(store())
        writer.start(snapshot(2))
        writer.wait(needed=True)

    lines = full_after(write, 100)
    assert "step 2 could not be written" in lines[0]
    assert lines[1].startswith("raised: the last checkpoint could not be written")


def test_checkpoints_are_written_in_order_and_one_failure_is_forgiven_after_a_good_one(
    store: MakeStore, snapshot: MakeSnapshot
) -> None:
    writer = checkpoint.Writer(store(keep=1))
    blocker = store().work / "step-00000002"  # a file where the folder should go
    for step in (1, 2, 3, 4):
        if step in (2, 4):
            writer.wait()
            blocker.with_name(f"step-{step:08d}").write_text("in the way")
        writer.start(snapshot(step))
    writer.wait()
    assert names(store().work) == [3]
