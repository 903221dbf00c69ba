"""What is refused before the first step, and that looking leaves no trace."""

import logging
import shutil
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mdc.config import Params
from mdc.errors import UserError
from mdc.files import read_json, sha256
from mdc.objectives import OBJECTIVES
from mdc.stages import STAGES, Folders, _check_inputs
from mdc.train import checkpoint, launch, preflight, strategy
from mdc.train.optim import build_optimizer
from mdc.train.preflight import Need, Place, Ready, look
from mdc.train.trainer import train

MakeParams = Callable[..., Params]
MakeShards = Callable[..., Path]
HERE = Path(__file__).parent
CPU = torch.device("cpu")


@pytest.fixture
def place(tmp_path: Path, shards: Path, small_params: MakeParams) -> Callable[..., Place]:
    """`place(shards=..., output=..., **pretrain)`"""

    def make(**changes: Any) -> Place:
        where = {name: changes.pop(name) for name in ("shards", "output") if name in changes}
        return replace(Place(small_params(**changes), shards, tmp_path / "out" / "model", tmp_path / "work"), **where)

    return make


@pytest.fixture
def ready(tmp_path: Path, small_params: MakeParams, shards: Path) -> Callable[..., Ready]:
    """`ready(**pretrain)`"""

    def make(**changes: Any) -> Ready:
        from mdc.config import ModelConfig
        from mdc.data.loader import ShardDataset
        from mdc.data.tokenizer import CaptionTokenizer

        params = small_params(**changes)
        dataset = ShardDataset(shards, "train")
        vocabulary = CaptionTokenizer.load(str(shards / "tokenizer.json")).vocabulary
        config = ModelConfig(pretrain=params.pretrain, vocabulary=vocabulary, max_tokens=params.caption.max_tokens)
        model = checkpoint.initial_model(config, 0)
        strategy.prepare_layers(model, params.compute)
        (tmp_path / "work").mkdir(exist_ok=True)
        return Ready(
            params=params,
            config=config,
            objective=OBJECTIVES[params.pretrain.objective],
            model=model,
            optimizer=build_optimizer(model, params.pretrain),
            averages=[],
            picture=dataset.images([0])[0],
            longest=dataset.longest,
            device=CPU,
            autocast=lambda: torch.autocast("cpu", enabled=False),
            output=tmp_path / "model",
            work=tmp_path / "work",
        )

    return make


# -- all at once ------------------------------------------------------------------------------------------------------


def test_one_line_tells_what_was_found(
    tmp_path: Path, shards: Path, small_params: MakeParams, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        train(small_params(), shards, tmp_path / "model", tmp_path / "runs")
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("preflight")]
    assert line.startswith("preflight: shards whole (36 train, 12 validation, 0 test), disk ")
    assert "free, memory " in line


def test_every_problem_is_told_at_once(tmp_path: Path, place: Callable[..., Place], make_shards: MakeShards) -> None:
    shards = make_shards(tmp_path)
    for name in ("train-00000.tar", "train-00001.tar"):
        (shards / name).write_bytes((shards / name).read_bytes()[:-512])
    (tmp_path / "file").touch()
    with pytest.raises(UserError) as refused:
        look(place(shards=shards, output=tmp_path / "file" / "model", batch_size=64).checks())
    text = str(refused.value)
    assert "train-00000.tar" in text
    assert "train-00001.tar" in text
    assert "pretrain.batch_size 64 is more than the 36 pairs" in text
    assert f"{tmp_path / 'file'} cannot be written" in text


def cut_within_a_member(data: bytes) -> bytes:
    return data[: len(data) // 2 + 100]


def cut_between_members(data: bytes) -> bytes:
    return data[: len(data) // 2 // 512 * 512]


def empty(data: bytes) -> bytes:
    return b""


def other_bytes(data: bytes) -> bytes:
    return data[:600] + bytes([data[600] ^ 1]) + data[601:]


@pytest.mark.parametrize("harm", [cut_within_a_member, cut_between_members, empty, other_bytes])
@pytest.mark.parametrize("name", ["train-00001.tar", "tokenizer.json", "samples.parquet"])
def test_a_damaged_file_is_named(
    tmp_path: Path, shards: Path, place: Callable[..., Place], harm: Callable[[bytes], bytes], name: str
) -> None:
    copy = shutil.copytree(shards, tmp_path / "shards")
    (copy / name).write_bytes(harm((copy / name).read_bytes()))
    with pytest.raises(UserError, match=name.replace(".", r"\.")):
        place(shards=copy).shards_whole()


def test_a_share_of_the_data_must_fill_a_batch(place: Callable[..., Place]) -> None:
    place(data_share=0.25).samples()
    with pytest.raises(UserError, match="batch_size 8 is more than the 7 pairs"):
        place(data_share=0.2).samples()


def test_looking_leaves_the_folders_as_they_were(tmp_path: Path, place: Callable[..., Place]) -> None:
    look(place().checks())
    assert not list((tmp_path / "work").iterdir())
    assert not list((tmp_path / "out").iterdir())


def test_ranks_that_differ_are_told_with_their_hosts(
    tmp_path: Path, shards: Path, small_params: MakeParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 has other software, and another folder for checkpoints."""
    monkeypatch.setattr(launch, "TARGET", "faulty")
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=":")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("FAULT", "1:0:differ")
    with pytest.raises(UserError) as refused:
        launch.pretrain(small_params(compute={"processes": 2}), shards, tmp_path / "model", tmp_path / "runs")
    assert "has timm 0.0, rank 0 on" in str(refused.value)
    assert "paths.runs must lie on storage that all hosts share" in str(refused.value)


def test_a_stage_leaves_the_reading_to_the_preflight(
    tmp_path: Path, shards: Path, small_params: MakeParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = replace(Folders.of(small_params().paths), shards=shutil.copytree(shards, tmp_path / "shards"))
    tar = at.shards / "train-00000.tar"
    tar.write_bytes(other_bytes(tar.read_bytes()))
    _check_inputs(STAGES["pretrain"], small_params(), at)
    with pytest.raises(UserError, match=r"train-00000\.tar is not what was written"):
        _check_inputs(STAGES["pretrain"], small_params(compute={"preflight": False}), at)


# -- disk and memory --------------------------------------------------------------------------------------------------


def test_checkpoints_must_fit_on_the_disk(ready: Callable[..., Ready], monkeypatch: pytest.MonkeyPatch) -> None:
    some = ready(keep_checkpoints=2)
    weights = sum(tensor.numel() * tensor.element_size() for tensor in some.model.state_dict().values())
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: usage(0, 0, 10 * weights))
    some.disk()  # three of weights and two moments, and the model
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: usage(0, 0, 10 * weights - 1))
    with pytest.raises(UserError, match=r"lower pretrain\.keep_checkpoints"):
        some.disk()
    (some.work / "step-00000004").mkdir()
    (some.work / "step-00000004" / "trainer.pt").write_bytes(b"0")
    some.disk()  # it will be replaced


@pytest.mark.parametrize("objective", ["mdc", "clip"])
def test_a_micro_batch_that_is_too_large_is_refused_with_one_that_fits(
    ready: Callable[..., Ready], monkeypatch: pytest.MonkeyPatch, objective: str
) -> None:
    some = ready(objective=objective)
    need = some.needed()
    free = int(need.of(4) / preflight.COUNTED_ON) + 1000
    monkeypatch.setattr(preflight, "free_memory", lambda _: free)
    with pytest.raises(UserError, match="8 images at once need about") as refused:
        some.memory()
    assert "set compute.activation_checkpointing: true" in str(refused.value)
    if objective == "mdc":
        assert "set pretrain.accumulate: 2 (4 images at once)" in str(refused.value)
        ready(accumulate=2).memory()
    else:
        assert "lower pretrain.batch_size to 4" in str(refused.value)


def test_what_a_batch_keeps_follows_from_two_small_ones(ready: Callable[..., Ready]) -> None:
    some = ready(batch_size=32, decoder_depth=2)
    need = some.needed()
    weights = sum(parameter.nbytes for parameter in some.model.parameters())
    assert need.of(32) - 7 * weights == pytest.approx(some._kept(32), rel=0.05)
    assert need.remembered == 2 * weights
    for parameter in some.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    some.optimizer.step()
    assert some.needed().remembered < 100 * len(some.optimizer.state), "what is remembered already is not needed again"


def test_a_layer_that_is_computed_again_is_counted(ready: Callable[..., Ready]) -> None:
    deep = {"batch_size": 32, "decoder_depth": 4}
    plain, sparing = ready(**deep), ready(**deep, compute={"activation_checkpointing": True})
    assert plain._recomputed(32) == 0
    again, layers = sparing._recomputed(32), len(strategy.layers(sparing.model))
    assert sparing._kept(32) < plain._kept(32) <= sparing._kept(32) + layers * again
    weights = sum(parameter.nbytes for parameter in sparing.model.parameters())
    assert sparing.needed().of(32) - 7 * weights == pytest.approx(sparing._kept(32) + again, rel=0.05)
    assert sparing.needed().of(32) < plain.needed().of(32)


def test_need_grows_with_images() -> None:
    need = Need(fixed=100, per_image=10, remembered=60)
    assert need.of(5) == 150
    assert need.images(159.0) == 5
    assert need.images(99.0) == 0


def test_limits_of_control_groups_hold(tmp_path: Path) -> None:
    """As Slurm nests them: the job's limit holds for its step."""
    job = tmp_path / "cgroup" / "slurm" / "job_1"
    (job / "step_0").mkdir(parents=True)
    (tmp_path / "self").write_text("12:cpuset:/\n0::/slurm/job_1/step_0\n")
    assert preflight._left_in_groups(tmp_path / "cgroup", tmp_path / "self") == []
    for folder, limit in ((job, "1000"), (job / "step_0", "max")):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text("700\n")
        (folder / "memory.stat").write_text("anon 500\ninactive_file 150\n")
    assert preflight._left_in_groups(tmp_path / "cgroup", tmp_path / "self") == [1000 - 700 + 150]


# -- operations -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["mdc", "autoregressive", "clip"])
def test_operations_are_those_of_a_real_step(ready: Callable[..., Ready], objective: str) -> None:
    """Beside a counted forward and backward pass, where the first layer needs no gradient of its input."""
    some = ready(objective=objective, decoder_depth=2)
    flops = some.step_flops()
    assert flops.per_token > 0
    for rows, length in ((8, some.longest), (4, 2)):
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            some._loss(rows, length).backward()
        expected = rows * (flops.per_image + length * flops.per_token)
        assert expected == pytest.approx(counter.get_total_flops(), rel=0.1)


# -- no trace ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"ema_decay": 0.5, "accumulate": 2},
        {"objective": "clip"},
        {"compute": {"activation_checkpointing": True}, "image_drop": 0.5},
    ],
)
def test_looking_changes_no_number(
    tmp_path: Path, shards: Path, small_params: MakeParams, options: dict[str, Any]
) -> None:
    dropping = {"patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "drop_path_rate": 0.5}
    for looks in (True, False):
        compute = {**options.get("compute", {}), "preflight": looks}
        params = small_params(**{**options, "encoder_options": dropping, "compute": compute})
        train(params, shards, tmp_path / f"{looks}", tmp_path / "runs")
    assert sha256(tmp_path / "True/model.safetensors") == sha256(tmp_path / "False/model.safetensors")
    assert sha256(tmp_path / "True/loss.csv") == sha256(tmp_path / "False/loss.csv")


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_looking_changes_no_number_on_two_ranks(
    tmp_path: Path, shards: Path, small_params: MakeParams, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for looks in (True, False):
        params = small_params(compute={"processes": 2, "preflight": looks, "strategy": strategy})
        launch.pretrain(params, shards, tmp_path / f"{looks}", tmp_path / "runs")
    assert sha256(tmp_path / "True/model.safetensors") == sha256(tmp_path / "False/model.safetensors")
    assert read_json(tmp_path / "runs" / "cost.json")["mfu"] is None, "nothing was counted"
