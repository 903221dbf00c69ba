"""Row `memory`: the peak memory of the training step that row `step` times, each side in processes of its own."""

import json
import subprocess
import sys
from pathlib import Path

from bench.frame import Result

ROUNDS, STEPS = 2, 2  # fresh processes per side, and updates in each: the first makes the optimiser's state
GB = 1e9 / 1024  # in KiB
SETTINGS: dict[str, tuple[str, str]] = {
    "ours": ("the step of row `step`", "the plain default"),
    "accumulate": ("the same, `accumulate: 8`", "the same gradient in eight parts"),
    "checkpointing": (
        "the same, `activation_checkpointing: true`",
        "activations of a layer are computed again in the backward pass",
    ),
}


def kib(kind: str) -> int:
    """Memory of this process. kind: VmRSS, now; VmHWM, the most so far, which unlike ru_maxrss knows no parent."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(kind))


def probe(side: str) -> None:
    """Make updates and print the memory held before the model was built, and the most of all, in KiB."""
    import torch

    from bench.training import Ours, hyperparameters, pairs
    from mdc.config import ComputeParams

    torch.set_num_threads(2)
    hyper = hyperparameters()
    batch = pairs(hyper.image_size)
    if side == "theirs":
        from bench.hugging_face import hugging_face

        libraries = kib("VmRSS")
        theirs = hugging_face(hyper)
        for _ in range(STEPS):
            theirs.step(batch.padded())
    else:
        libraries = kib("VmRSS")
        ours = Ours(hyper, compute=ComputeParams(activation_checkpointing=side == "checkpointing"))
        for _ in range(STEPS):
            ours.step(batch, accumulate=8 if side == "accumulate" else 1)
    print(json.dumps({"libraries": libraries, "peak": kib("VmHWM")}))


def measure() -> list[Result]:
    sides = [*SETTINGS, "theirs"]
    peaks: dict[str, list[float]] = {side: [] for side in sides}
    steps: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(ROUNDS):
        for side in sides:
            done = subprocess.run([sys.executable, "-m", "bench.memory", side], stdout=subprocess.PIPE, check=True)
            taken = json.loads(done.stdout)
            peaks[side].append(taken["peak"] / GB)
            steps[side].append((taken["peak"] - taken["libraries"]) / GB)
    results = []
    for side, (work, compared) in SETTINGS.items():
        for figures, what in ((steps, "above the libraries"), (peaks, "whole process")):
            results.append(
                Result(
                    "memory",
                    f"{work}: peak memory, {what}",
                    "Hugging Face `VisionEncoderDecoderModel`",
                    "GB",
                    figures[side],
                    figures["theirs"],
                    aim=0.6,
                    smaller_is_better=True,
                    compared=compared if what == "above the libraries" else "",
                )
            )
    return results


if __name__ == "__main__":
    probe(sys.argv[1])
