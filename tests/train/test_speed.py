"""Where the time goes, against a clock of the test's own."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mdc.config import ComputeParams, Params
from mdc.data.loader import Batch, ShardDataset
from mdc.files import read_json
from mdc.train import speed, trainer
from mdc.train.speed import Advice, Meter, StepFlops, Work


@pytest.fixture
def sleep(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """`sleep(2.0)`: the clock goes on by 2 seconds, and by nothing else."""
    now = 100.0

    def go_on(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(speed.time, "perf_counter", lambda: now)
    return go_on


def a_batch(rows: int = 4, length: int = 3) -> Batch:
    """Captions of one token less than the longest."""
    tokens, lengths = torch.zeros(rows, length, dtype=torch.long), torch.full((rows,), length - 1)
    images = torch.zeros(rows, 3, 2, 2, dtype=torch.uint8)
    return Batch(images, tokens, lengths, ["u"] * rows, 0, rows, 0, read_s=0.25, decode_s=0.75)


def test_a_lap_says_what_was_done_and_for_how_long(sleep: Callable[[float], None]) -> None:
    meter = Meter(torch.device("cpu"))
    meter.step_flops = StepFlops(per_image=100.0, per_token=10.0)
    for batch in (a_batch(), a_batch(2, 5)):
        for part, seconds in (("data", 1.0), ("move", 0.5)):
            with meter.spent(part):
                sleep(seconds)
        meter.count(batch)
        sleep(2.0)
    for part, seconds in (("save", 3.0), ("validate", 4.0)):
        with meter.spent(part):
            sleep(seconds)
    expected = Work(
        elapsed_s=7.0,
        rank_s=14.0,
        data_s=2.0,
        move_s=1.0,
        save_s=3.0,
        validate_s=4.0,
        read_s=0.5,
        decode_s=1.5,
        images=6,
        tokens=4 * 2 + 2 * 4,
        flops=4 * 130.0 + 2 * 150.0,
    )
    assert meter.work() == expected, "looking changes nothing"
    assert meter.lap() == expected
    sleep(1.0)
    assert meter.lap() == Work(elapsed_s=1.0, rank_s=1.0), "a lap begins where the one before ended"


def test_the_time_of_a_gpu_is_measured_in_its_own_queue(
    sleep: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host waits a second for each of two batches; the GPU was idle for 0.2 s, then for 0.3 s."""

    @dataclass
    class Mark:
        idle_ms: float
        waited: bool = False

        def synchronize(self) -> None:
            self.waited = True

        def elapsed_time(self, after: "Mark") -> float:
            assert after.waited, "CUDA raises an error here"
            return self.idle_ms

    marks = iter([Mark(200.0), Mark(0.0), Mark(300.0), Mark(0.0)])
    monkeypatch.setattr(Meter, "_mark", lambda _: next(marks))
    meter = Meter(torch.device("cuda"))
    for _ in range(2):
        with meter.spent("data"):
            sleep(1.0)
    assert meter.lap().data_s == pytest.approx(0.5)
    assert meter.lap().data_s == 0


def test_shares_rates_and_utilisation() -> None:
    """Two ranks of 10 s each."""
    work = Work(8.0, 20.0, 2.0, 1.0, save_s=3.0, validate_s=1.0, read_s=4.0, decode_s=6.0, images=80, tokens=400)
    assert work.shares() == pytest.approx({"data": 0.1, "move": 0.05, "save": 0.15, "validate": 0.05, "compute": 0.65})
    metrics = replace(work, flops=48.0).metrics(loaders=2, peak=6.0)
    assert metrics["images_per_s"] == 10
    assert metrics["tokens_per_s"] == 50
    assert metrics["mfu"] == pytest.approx(48 / (16 * 6)), "saving and validating are left out"
    assert metrics["time/compute"] == pytest.approx(0.65)
    assert metrics["loader/reading"] == pytest.approx(4 / 40)
    assert metrics["loader/decode_s_per_image"] == pytest.approx(6 / 80)
    assert "mfu" not in work.metrics(loaders=1, peak=6.0)
    assert "mfu" not in replace(work, flops=48.0).metrics(loaders=1, peak=0.0), "of an unknown device"
    assert "10 images/s" in work.summary(0.0)
    cost = replace(work, flops=48.0).cost(6.0)
    assert (cost["seconds"], cost["tokens"], cost["images_per_s"], cost["mfu"]) == (8.0, 400, 10.0, 0.5)
    assert cost["time"]["save"] == 0.15
    assert work.cost(0.0)["mfu"] is None


def test_work_of_one_rank_is_the_work_of_all() -> None:
    own = Work(2.0, 4.0, 1.0, images=3)
    assert speed.over_ranks(own) == (own, 0.25)
    assert own + own == Work(4.0, 8.0, 2.0, images=6)


@pytest.mark.parametrize(
    ("name", "bf16", "tf32", "tflops"),
    [
        ("NVIDIA H200", True, False, 989),
        ("NVIDIA H100 80GB HBM3", True, True, 989),
        ("NVIDIA H100 PCIe", False, True, 378),
        ("NVIDIA H100 NVL", True, False, 835),
        ("NVIDIA A100-SXM4-80GB", False, True, 156),
        ("NVIDIA A100-SXM4-80GB", False, False, 19.5),
        ("NVIDIA A10G", True, False, 70),
        ("NVIDIA A10", True, False, 125),
        ("NVIDIA L4", True, False, 121),
        ("NVIDIA L40S", True, False, 362),
        ("NVIDIA B200", True, False, 2250),
        ("NVIDIA GeForce GTX 1080", False, False, 0),
    ],
)
def test_peaks_are_found_by_name(name: str, bf16: bool, tf32: bool, tflops: float) -> None:
    assert speed.listed_peak(name, bf16, tf32) == pytest.approx(tflops * 1e12)


def test_a_cpu_is_measured_unless_its_peak_is_given() -> None:
    cpu = torch.device("cpu")
    assert speed.peak_flops(cpu, False, ComputeParams(peak_tflops=2.5)) == 2.5e12
    assert speed.peak_flops(cpu, False, ComputeParams()) > 1e8


READING = Work(1.0, 1.0, 0.5, read_s=0.4, decode_s=0.1, images=100)
DECODING = Work(1.0, 1.0, 0.5, read_s=0.1, decode_s=0.4, images=100)


def advice(cached: bool = False, cores: int = 3) -> Advice:
    made = Advice(ComputeParams(workers=2), block_samples=8, cached=cached, free_cores=cores)
    assert not made.on(READING, 0.9), "loader processes start in the first interval"
    return made


def test_advice_names_the_parameter_to_raise_once_per_cause() -> None:
    given = advice()
    assert not given.on(DECODING, 0.1)
    text = given.on(DECODING, 0.5)
    assert text.startswith("50% of the time goes into waiting for data, most of it decoding")
    assert "4.00 ms to decode" in text
    assert "raise compute.workers: 3 cores are free" in text
    assert not given.on(DECODING, 0.5)
    assert "pretrain.block_samples (now 8)" in given.on(READING, 0.5)
    assert not given.on(READING, 0.5)
    assert given.on(DECODING, 0.5), "the cause changed"


def test_advice_asks_for_no_cores_that_are_not_there() -> None:
    assert "no core is free" in advice(cores=0).on(DECODING, 0.5)
    assert not advice(cached=True).on(DECODING, 0.5), "no parameter helps where pictures are in memory"


def test_free_cores_are_those_of_no_rank_and_no_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert speed.free_cores(ComputeParams(workers=3), torch.device("cuda")) == 16 - 2 * (1 + 3)
    assert speed.free_cores(ComputeParams(workers=3), torch.device("cpu")) == 16 - 2 * (4 + 3)
    assert speed.free_cores(ComputeParams(workers=9), torch.device("cpu")) == 0


def test_a_training_that_waits_for_data_says_so(
    tmp_path: Path,
    shards: Path,
    small_params: Callable[..., Params],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Pictures are not kept in memory, and each takes long to decode."""
    decode = ShardDataset._decode

    def slowly(dataset: ShardDataset, data: memoryview) -> Any:
        time.sleep(0.02)
        return decode(dataset, data)

    monkeypatch.setattr(ShardDataset, "_decode", slowly)
    monkeypatch.setattr(trainer, "ShardDataset", partial(ShardDataset, cache_bytes=0))
    trainer.train(small_params(validate_every=100), shards, tmp_path / "model", tmp_path / "runs")
    told = [record.getMessage() for record in caplog.records if "waiting for data" in record.getMessage()]
    assert len(told) == 1
    assert "most of it decoding" in told[0]
    assert read_json(tmp_path / "runs" / "cost.json")["time"]["data"] > 0.1
