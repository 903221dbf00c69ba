"""On a machine with GPUs: `python -m bench.gpu FOLDER`, about eight minutes. `--smoke` tries the same on a CPU, tiny.

Makes shards of random pictures, checks bfloat16 with torch.compile against float32, and measures how much of the GPUs
mdc's own trainer uses with ViT-B/16 and ViT-L/14: on every GPU of the machine, by DDP and, where there are several, by
FSDP. Prints a table and writes FOLDER/gpu.json.
"""

import argparse
import csv
import hashlib
import io
import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from mdc.config import CaptionParams, Params, ShardParams
from mdc.data.captions import prepare_captions
from mdc.data.packing import write_shards
from mdc.data.parts import PART_SCHEMA, part_path
from mdc.data.tars import FixedTar
from mdc.files import read_json, write_manifest
from mdc.train.launch import pretrain
from mdc.train.work import COST

TOLERANCE = 0.02  # of the loss, bf16 compiled against fp32, over the first updates
FIRST = 5  # updates that are compared


@dataclass(frozen=True)
class Plan:
    """What is run. steps: of the check. short, long: updates whose difference is measured, so that start and
    compilation are left out. batches: images per GPU and update, by preset.
    """

    device: str
    pictures: int
    stored: int  # pixels
    check: dict[str, Any]  # the `pretrain` section
    steps: int
    batches: dict[str, int]
    short: int
    long: int


ON_GPU = Plan(
    device="cuda",
    pictures=6000,
    stored=256,
    check={"preset": "vit_b16", "batch_size": 64, "warmup_steps": 10, "lr": 3e-4},
    steps=40,
    batches={"vit_b16": 256, "vit_l14": 128},
    short=10,
    long=70,
)
SMOKE = Plan(
    device="cpu",
    pictures=150,
    stored=40,
    check={
        "preset": "nano",
        "encoder_options": {"patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2},
        "decoder_width": 32,
        "decoder_depth": 1,
        "decoder_heads": 2,
        "batch_size": 16,
        "warmup_steps": 2,
        "lr": 3e-3,
    },
    steps=20,
    batches={"nano": 32},
    short=2,
    long=6,
)


def make_shards(folder: Path, plan: Plan) -> Path:
    """Pairs of a random picture, as smooth as a photograph, and a caption of 4 to 40 random words."""
    downloaded, captions, shards = (folder / name for name in ("downloaded", "captions", "shards"))
    downloaded.mkdir(parents=True)
    generator = np.random.default_rng(0)
    words = [f"word{number}" for number in range(500)]
    rows = []
    with part_path(downloaded, 0, ".tar").open("wb") as file:
        tar = FixedTar(file)
        for number in range(plan.pictures):
            coarse = Image.fromarray(generator.integers(0, 256, (32, 32, 3), dtype=np.uint8))
            picture = io.BytesIO()
            coarse.resize((plan.stored, plan.stored), Image.Resampling.BICUBIC).save(picture, "jpeg", quality=90)
            uid, data = f"u{number:06d}", picture.getvalue()
            tar.add(f"{uid}.jpg", data)
            caption = " ".join(generator.choice(words, generator.integers(4, 41)))
            rows.append({"uid": uid, "caption": caption, "status": "ok", "sha256": hashlib.sha256(data).hexdigest()})
        tar.close()
    pq.write_table(pa.Table.from_pylist(rows, PART_SCHEMA), part_path(downloaded, 0, ".parquet"))
    write_manifest(downloaded, {}, {})
    prepare_captions(CaptionParams(vocab_size=2000, max_tokens=64), downloaded, captions)
    write_shards(ShardParams(), downloaded, captions, shards)
    return shards


@dataclass(frozen=True)
class Trained:
    """cost: what the trainer says of its time. losses: by update."""

    cost: dict[str, Any]
    losses: list[float]


def train(plan: Plan, shards: Path, folder: Path, hyper: dict[str, Any], compute: dict[str, Any]) -> Trained:
    """One training by mdc's own launcher, from scratch."""
    shutil.rmtree(folder, ignore_errors=True)
    params = Params.model_validate(
        {
            "download": {"image_size": plan.stored},
            "caption": {"max_tokens": 64},
            "pretrain": {"log_every": 1, "validate_every": 10_000, "checkpoint_every": 10_000, **hyper},
            "compute": {"device": plan.device, "workers": 6 if plan.device == "cuda" else 1, **compute},
            "tracking": {"uri": ""},
        }
    )
    pretrain(params, shards, folder / "model", folder / "runs")
    with (folder / "model" / "loss.csv").open(newline="") as file:
        losses = [float(row["train_loss"]) for row in csv.DictReader(file)]
    return Trained(read_json(folder / "runs" / COST), losses)


def check(plan: Plan, shards: Path, folder: Path) -> dict[str, Any]:
    """Whether bfloat16, compiled, follows float32 over the first updates, and learns."""
    hyper = {**plan.check, "steps": plan.steps}
    exact = train(plan, shards, folder, hyper, {"precision": "fp32"}).losses
    fast = train(plan, shards, folder, hyper, {"precision": "bf16", "compile": True}).losses
    apart = max(abs(a - b) / a for a, b in zip(exact[:FIRST], fast[:FIRST], strict=True))
    learns = bool(np.isfinite(fast).all()) and np.mean(fast[-5:]) < np.mean(fast[:5])
    return {
        "fp32": exact,
        "bf16, compiled": fast,
        "largest_difference": apart,
        "passed": bool(learns and apart <= TOLERANCE),
    }


def measure(plan: Plan, shards: Path, folder: Path, preset: str, ranks: int, strategy: str) -> dict[str, Any]:
    """Speed once running: what the longer of two trainings took more than the shorter one.

    One before them fills the compiler's cache, so that both find the same.
    """
    hyper = {"preset": preset, "batch_size": plan.batches[preset] * ranks, "warmup_steps": 1, "log_every": 10}
    compute = {"processes": ranks, "strategy": strategy, "precision": "bf16", "compile": plan.device == "cuda"}
    costs = [
        train(plan, shards, folder, {**hyper, "steps": steps}, compute).cost
        for steps in (plan.short, plan.short, plan.long)
    ]
    short, long = costs[1:]
    elapsed_s = long["seconds"] - short["seconds"]
    speed = (long["images"] - short["images"]) / elapsed_s
    waited_s = long["time"]["data"] * long["seconds"] - short["time"]["data"] * short["seconds"]
    mfu = long["mfu"] and long["mfu"] * speed / long["images_per_s"]
    return {
        "preset": preset,
        "ranks": ranks,
        "strategy": strategy,
        "batch": hyper["batch_size"],
        "images_per_s": round(speed, 1),
        "mfu": mfu and round(mfu, 4),
        "data_share": round(max(0.0, waited_s / elapsed_s), 4),
        "trainings": costs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("folder", type=Path, help="for gpu.json; made if it is not there")
    parser.add_argument("--smoke", action="store_true", help="tiny models on the CPU")
    arguments = parser.parse_args()
    plan = SMOKE if arguments.smoke else ON_GPU
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    work = arguments.folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    shards = make_shards(work / "data", plan)
    name = torch.cuda.get_device_name() if plan.device == "cuda" else "CPU"
    ranks = torch.cuda.device_count() if plan.device == "cuda" else 2
    report: dict[str, Any] = {"device": name, "torch": torch.__version__, "speed": []}

    def keep() -> None:
        (arguments.folder / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")

    report["check"] = checked = check(plan, shards, work / "check")
    keep()
    verdict = "passed" if checked["passed"] else "FAILED"
    print(f"{name}: bf16 compiled against fp32: {verdict}, {checked['largest_difference']:.1e} apart", flush=True)
    print(
        f"{'preset':8} {'ranks':>5} {'':5} {'batch':>5} {'images/s':>9} {'MFU':>6} {'waits for data':>14}", flush=True
    )
    for preset in plan.batches:
        for count, strategy in [(1, "ddp"), *([(ranks, "ddp"), (ranks, "fsdp")] if ranks > 1 else [])]:
            row = measure(plan, shards, work / "speed", preset, count, strategy)
            report["speed"].append(row)
            keep()  # a machine may be taken away
            used = f"{row['mfu']:.1%}" if row["mfu"] else "?"
            print(
                f"{preset:8} {count:5} {strategy:5} {row['batch']:5} {row['images_per_s']:9.0f} {used:>6} "
                f"{row['data_share']:14.1%}",
                flush=True,
            )
    shutil.rmtree(work)
    if not checked["passed"]:
        raise SystemExit("error: bf16 with torch.compile does not follow fp32")


if __name__ == "__main__":
    main()
