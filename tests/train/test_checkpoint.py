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
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from mdc.errors import UserError
from mdc.train import checkpoint


@pytest.fixture
def parts(tiny_config: Callable[..., Any], shards: Path) -> dict[str, Any]:
    """What `save_checkpoint` writes."""
    config = tiny_config()
    return {
        "model": checkpoint.initial_model(config, seed=1),
        "config": config,
        "tokenizer_path": shards / "tokenizer.json",
        "state": {"optimizer": {"state": {0: {"step": torch.tensor(3.0)}}}},
        "progress": {"step": 3, "history": [{"lr": 0.1}]},
    }


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


def test_a_checkpoint_of_a_training_gives_back_what_was_saved(tmp_path: Path, parts: dict[str, Any]) -> None:
    folder = checkpoint.save_checkpoint(tmp_path, 3, **parts, keep=2)
    model = checkpoint.initial_model(parts["config"], seed=2)
    state, progress = checkpoint.load_checkpoint(folder, model)
    assert progress == parts["progress"]
    assert state["optimizer"]["state"][0]["step"] == 3
    saved = parts["model"].state_dict()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path, parts: dict[str, Any]) -> None:
    for step in (5, 10, 15, 100):
        checkpoint.save_checkpoint(tmp_path, step, **parts, keep=2)
    assert [folder.name for folder in checkpoint.step_folders(tmp_path)] == ["step-00000100", "step-00000015"]


@pytest.mark.parametrize("file", [checkpoint.WEIGHTS, checkpoint.STATE, checkpoint.PROGRESS, "manifest.json"])
@pytest.mark.parametrize("damage", ["half", "empty", "gone", "changed"])
def test_a_damaged_checkpoint_is_passed_over_aloud(
    tmp_path: Path, parts: dict[str, Any], caplog: pytest.LogCaptureFixture, file: str, damage: str
) -> None:
    good = checkpoint.save_checkpoint(tmp_path, 5, **parts, keep=2)
    path = checkpoint.save_checkpoint(tmp_path, 10, **parts, keep=2) / file
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    elif damage == "changed":
        path.write_bytes(content[:-2] + bytes([content[-2] ^ 1, content[-1] ^ 1]))
    else:
        path.write_bytes(content[: len(content) // 2] if damage == "half" else b"")
    with caplog.at_level(logging.WARNING):
        assert checkpoint.newest_checkpoint(tmp_path) == good
    assert "step-00000010 is damaged" in caplog.text
    assert path.parent.is_dir(), "nothing is removed"


def in_child(work: Callable[[], None]) -> int:
    """The id of a forked process that does `work`."""
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    return pid


def test_a_kill_at_any_moment_leaves_a_good_checkpoint(tmp_path: Path, parts: dict[str, Any]) -> None:
    def save_for_ever(step: int) -> None:
        while True:
            step += 1
            checkpoint.save_checkpoint(tmp_path, step, **parts, keep=1)

    folder = checkpoint.save_checkpoint(tmp_path, 1, **parts, keep=1)
    for attempt in range(20):
        pid = in_child(partial(save_for_ever, int(folder.name.removeprefix("step-"))))
        time.sleep(0.03 + 0.007 * attempt)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        newest = checkpoint.newest_checkpoint(tmp_path)
        assert newest is not None
        assert newest >= folder
        folder = newest
        assert checkpoint.load_checkpoint(folder, parts["model"])[1] == parts["progress"]


def test_a_full_disk_fails_aloud_and_keeps_the_older_checkpoint(tmp_path: Path, parts: dict[str, Any]) -> None:
    good = checkpoint.save_checkpoint(tmp_path, 1, **parts, keep=1)
    limit = (good / checkpoint.WEIGHTS).stat().st_size // 2

    def save() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            checkpoint.save_checkpoint(tmp_path, 2, **parts, keep=1)
        except (OSError, SafetensorError):
            os._exit(7)

    _, status = os.waitpid(in_child(save), 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert checkpoint.newest_checkpoint(tmp_path) == good
    assert checkpoint.step_folders(tmp_path) == [good]
