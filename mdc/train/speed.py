"""Where the time of a training goes, how fast it is, and how much of the device it uses.

L: tokens of the longest caption of a batch.
"""

import contextlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Self

import torch

from mdc import dist
from mdc.config import ComputeParams
from mdc.data.loader import Batch

MOST_DATA = 0.1  # share of the time; above it the reason is told
MATRIX = 1024  # side of the products that measure a CPU: larger ones are not faster

# Dense matrix products, 10^12 operations per second in (bf16, tf32, fp32), from the makers' data sheets; the first name
# that is found in the device's counts.
PEAKS: tuple[tuple[str, tuple[float, float, float]], ...] = (
    (r"B200", (2250, 1125, 75)),
    (r"H[12]00.*NVL", (835, 417.5, 60)),
    (r"H100 PCIe", (756, 378, 51)),
    (r"H100|H200|GH200", (989, 494.5, 67)),
    (r"H20\b", (148, 74, 44)),
    (r"A100|A800", (312, 156, 19.5)),
    (r"A10G", (70, 35, 35)),
    (r"A10\b", (125, 62.5, 31.2)),
    (r"A30\b", (165, 82, 10.3)),
    (r"A40\b", (149.7, 74.8, 37.4)),
    (r"L40S", (362, 183, 91.6)),
    (r"L40\b", (181, 90.5, 90.5)),
    (r"L4\b", (121, 60, 30.3)),
    (r"RTX A6000", (154.8, 77.4, 38.7)),
    (r"RTX 4090", (165.2, 82.6, 82.6)),
    (r"RTX 3090", (71, 35.6, 35.6)),
    (r"MI300X", (1307, 653.7, 163.4)),
    (r"MI250X", (383, 95.7, 95.7)),
)


@dataclass(frozen=True)
class Work:
    """What ranks did, which adds up over time and over ranks. Seconds are those of a rank unless said otherwise."""

    elapsed_s: float = 0.0  # on the clock, without saving and validating
    rank_s: float = 0.0  # in all
    data_s: float = 0.0  # waiting for batches; on a GPU only while it had nothing else to do
    move_s: float = 0.0  # bringing them to the device, as far as it does not compute meanwhile
    save_s: float = 0.0  # waiting for checkpoints
    validate_s: float = 0.0
    read_s: float = 0.0  # of the processes that make batches: reading shards
    decode_s: float = 0.0  # and decoding pictures
    images: int = 0
    tokens: int = 0  # real ones, without padding
    flops: float = 0.0  # of the model, forward and backward, each counted once however often it is computed

    def __add__(self, other: Self) -> Self:
        return type(self)(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    @property
    def train_s(self) -> float:
        return self.rank_s - self.save_s - self.validate_s

    def shares(self) -> dict[str, float]:
        """Of the ranks' time; they add up to 1. What is in no other part is computing."""
        parts = {"data": self.data_s, "move": self.move_s, "save": self.save_s, "validate": self.validate_s}
        shares = {name: seconds / max(self.rank_s, 1e-9) for name, seconds in parts.items()}
        return {"compute": max(0.0, 1 - sum(shares.values())), **shares}

    def utilisation(self, peak: float) -> float:
        """Model FLOP utilisation (Chowdhery et al. 2022, arXiv 2204.02311, appendix B), without saving and validating.

        peak: operations per second of one device.
        """
        return self.flops / max(self.train_s * peak, 1e-9)

    def metrics(self, loaders: int, peak: float) -> dict[str, float]:
        """By the names that they are tracked under.

        loaders: processes per rank that make batches. peak: operations per second of one device, 0 if unknown.
        `time/*` are shares of the ranks' time. `loader/reading` and `loader/decoding` are shares of the time of the
        processes that make batches: with compute.workers these work beside the computation, so that their time is no
        loss until they cannot keep up.
        """
        loader_s, images = max(self.rank_s * loaders, 1e-9), max(self.images, 1)
        metrics = {
            "images_per_s": self.images / max(self.elapsed_s, 1e-9),
            "tokens_per_s": self.tokens / max(self.elapsed_s, 1e-9),
            **{f"time/{name}": share for name, share in self.shares().items()},
            "loader/reading": self.read_s / loader_s,
            "loader/decoding": self.decode_s / loader_s,
            "loader/read_s_per_image": self.read_s / images,
            "loader/decode_s_per_image": self.decode_s / images,
        }
        if peak and self.flops:
            metrics["mfu"] = self.utilisation(peak)
        return metrics

    def summary(self, peak: float) -> str:
        """One line on a whole training."""
        shares = ", ".join(f"{name} {share:.1%}" for name, share in self.shares().items())
        used = f", {self.utilisation(peak):.1%} of {peak / 1e12:.3g} TFLOP/s" if peak and self.flops else ""
        return (
            f"trained on {self.images:,} images and {self.tokens:,} tokens in {self.elapsed_s:,.0f} s: "
            f"{self.images / max(self.elapsed_s, 1e-9):,.0f} images/s{used}; time: {shares}"
        )

    def cost(self, peak: float) -> dict[str, Any]:
        """What a whole training took, for a file."""
        metrics = self.metrics(1, peak)
        return {
            "seconds": round(self.elapsed_s, 3),
            "tokens": self.tokens,
            "images_per_s": round(metrics["images_per_s"], 3),
            "mfu": round(metrics["mfu"], 4) if "mfu" in metrics else None,
            "time": {name: round(share, 4) for name, share in self.shares().items()},
        }


def over_ranks(own: Work) -> tuple[Work, float]:
    """The work of all ranks, and the longest share of its time that a rank waited for data. All ranks take part."""
    parts = dist.gather_objects(own)
    total = sum(parts, Work())
    slowest = max(part.data_s / max(part.rank_s, 1e-9) for part in parts)
    return replace(total, elapsed_s=max(part.elapsed_s for part in parts)), slowest


@dataclass(frozen=True)
class StepFlops:
    """Operations of one image with its caption, forward and backward: `per_image + L * per_token`."""

    per_image: float = 0.0
    per_token: float = 0.0

    def of(self, batch: Batch) -> float:
        rows, length = batch.tokens_BL.shape
        return rows * (self.per_image + length * self.per_token)


PARTS = ("data", "move", "save", "validate")


class Meter:
    """Measures what one rank does.

    A GPU works through a queue of its own, so that the host's clock tells little: the host may wait for data while the
    GPU has work left. So a part is the time between two marks in that queue: all that the GPU did for it, and all that
    it stood idle.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.step_flops = StepFlops()
        self._start = time.perf_counter()
        self._spent = dict.fromkeys(PARTS, 0.0)
        self._marks: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._counted = Work()

    def count(self, batch: Batch) -> None:
        """A batch that is trained on."""
        self._counted += Work(
            read_s=batch.read_s,
            decode_s=batch.decode_s,
            images=len(batch.uids),
            tokens=int(batch.lengths_B.sum()),
            flops=self.step_flops.of(batch),
        )

    @contextlib.contextmanager
    def spent(self, part: str) -> Iterator[None]:
        """Around what belongs to one of `PARTS`."""
        start, before = time.perf_counter(), self._mark()
        yield
        after = self._mark()
        if before is not None and after is not None:
            self._marks.append((part, before, after))
        else:
            self._spent[part] += time.perf_counter() - start

    def _mark(self) -> torch.cuda.Event | None:
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def work(self) -> Work:
        """What was done since the last lap. Call it where the host has waited for the device anyway."""
        for part, before, after in self._marks:
            after.synchronize()
            self._spent[part] += before.elapsed_time(after) / 1000
        self._marks.clear()
        rank_s, spent = time.perf_counter() - self._start, self._spent
        seconds = Work(
            elapsed_s=rank_s - spent["save"] - spent["validate"],
            rank_s=rank_s,
            data_s=spent["data"],
            move_s=spent["move"],
            save_s=spent["save"],
            validate_s=spent["validate"],
        )
        return self._counted + seconds

    def lap(self) -> Work:
        """The same, and a new lap begins."""
        done = self.work()
        self._start += done.rank_s
        self._spent = dict.fromkeys(PARTS, 0.0)
        self._counted = Work()
        return done


# -- the device -------------------------------------------------------------------------------------------------------


def peak_flops(device: torch.device, bf16: bool, compute: ComputeParams) -> float:
    """Operations per second of the device's dense matrix products in the precision used; 0 if unknown.

    A GPU is looked up by its name, a CPU measured with the threads that torch uses.
    """
    if compute.peak_tflops:
        return compute.peak_tflops * 1e12
    if device.type == "cpu":
        return _measured(torch.bfloat16 if bf16 else torch.float32, torch.get_num_threads())
    return listed_peak(torch.cuda.get_device_name(device), bf16, compute.precision == "tf32")


def listed_peak(name: str, bf16: bool, tf32: bool) -> float:
    """From `PEAKS`; 0 for a device that is not in it."""
    for pattern, peaks in PEAKS:
        if re.search(pattern, name):
            return peaks[0 if bf16 else 1 if tf32 else 2] * 1e12
    return 0.0


@lru_cache
def _measured(dtype: torch.dtype, threads: int) -> float:
    """threads: what torch uses, for another answer when it changes."""
    side = MATRIX if dtype == torch.float32 else MATRIX // 4  # a CPU without bfloat16 takes seconds for it
    matrix, best_s = torch.ones(side, side, dtype=dtype), float("inf")
    for _ in range(4):
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        best_s = min(best_s, time.perf_counter() - start)
    return 2 * side**3 / best_s


# -- advice -----------------------------------------------------------------------------------------------------------


class Advice:
    """Says which parameter to raise where a training waits for data: once per cause."""

    def __init__(self, compute: ComputeParams, block_samples: int, cached: bool, free_cores: int) -> None:
        """cached: all pictures are in memory. free_cores: see `free_cores`."""
        self.compute, self.block_samples = compute, block_samples
        self.cached, self.free_cores = cached, free_cores
        self.told = ""
        self.first = True

    def on(self, work: Work, slowest: float) -> str:
        """What to tell on an interval, "" for nothing. slowest: the largest data share of any rank.

        The first interval is not judged, since loader processes start in it.
        """
        if self.first or self.cached or slowest <= MOST_DATA:
            self.first = False
            return ""
        cause = "reading" if work.read_s > work.decode_s else "decoding"
        if cause == self.told:
            return ""
        self.told = cause
        images = max(work.images, 1)
        return (
            f"{slowest:.0%} of the time goes into waiting for data, most of it {cause} (an image takes "
            f"{1e3 * work.read_s / images:.2f} ms to read and {1e3 * work.decode_s / images:.2f} ms to decode, with "
            f"compute.workers: {self.compute.workers}); {self._remedy(cause)}"
        )

    def _remedy(self, cause: str) -> str:
        if cause == "reading":
            return (
                f"raise pretrain.block_samples (now {self.block_samples}), so that one read brings more, or "
                "compute.workers, or put the shards on a faster disk"
            )
        if self.free_cores > 0:
            return f"raise compute.workers: {self.free_cores} cores are free"
        return (
            "no core is free for more compute.workers: use fewer compute.processes on this machine, or store "
            "smaller pictures (download.image_size)"
        )


def free_cores(compute: ComputeParams, device: torch.device) -> int:
    """Cores of this machine that neither ranks, with the threads that they compute with, nor their loaders use."""
    cores, ranks = len(os.sched_getaffinity(0)), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    own = 1 if device.type == "cuda" else torch.get_num_threads()
    return max(0, cores - ranks * (own + compute.workers))
