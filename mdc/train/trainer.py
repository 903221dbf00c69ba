"""The training loop: one program for one process and for many, for every objective.

The global batch, its augmentation and its masks are functions of (data version, seed, step) and never of the rank, the
loss is divided by what the batch holds over all ranks, and the state of a training is what its checkpoints hold. So a
training gives the same losses on any number of ranks, and when it is killed and taken up again.
"""

import contextlib
import copy
import csv
import logging
import math
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from mdc import dist, files
from mdc.config import ModelConfig, Params, choose
from mdc.data.loader import Batch, ShardDataset, TrainLoader, on_device
from mdc.data.tokenizer import CaptionTokenizer
from mdc.data.transforms import eval_images, train_images
from mdc.draws import Draws, derive_seed
from mdc.errors import UserError
from mdc.objectives import OBJECTIVES, TextImage
from mdc.ranks import failures_recorded
from mdc.train import checkpoint, strategy
from mdc.train.optim import (
    build_optimizer,
    learning_rate,
    optimizer_state,
    restore_optimizer,
    scale_and_clip,
    set_learning_rate,
)
from mdc.train.preflight import Place, Ready, look
from mdc.train.pulse import Pulse
from mdc.train.speed import Advice, Meter, Work, free_cores, over_ranks, peak_flops
from mdc.train.tracking import TrackedData, Tracker, git_commit
from mdc.train.watch import Guard, Stop
from mdc.train.work import BOOKKEEPING, COST, FAILURE, RUN, work_folder

log = logging.getLogger(__name__)

VALIDATION_BATCH = 256  # images; a constant, since masks are drawn per batch
STOP_PATIENCE_S = 10.0  # for tracking when a training does not end well: its launcher waits
COLUMNS = ("step", "images", "train_loss", "validation_loss", "lr")


class Trainer:
    """A training under way. `run` is the loop."""

    def __init__(self, params: Params, shards: Path, work: Path, device: torch.device, stop: Stop) -> None:
        self.params, self.hyper, self.shards, self.work = params, params.pretrain, shards, work
        self.device, self.stop = device, stop
        self.rank, self.world = dist.rank(), dist.world_size()
        self.tokenizer_path = shards / checkpoint.TOKENIZER
        vocabulary = CaptionTokenizer.load(str(self.tokenizer_path)).vocabulary
        self.config = ModelConfig(pretrain=self.hyper, vocabulary=vocabulary, max_tokens=params.caption.max_tokens)
        self.train_set = ShardDataset(shards, "train", share=self.hyper.data_share)
        self.validation_set = ShardDataset(shards, "validation")
        longest = max(self.train_set.longest, self.validation_set.longest)
        if longest > self.config.max_tokens:
            raise UserError(
                f"{shards} holds a caption of {longest} tokens but caption.max_tokens is {self.config.max_tokens}; "
                "run `mdc stage caption` and `mdc stage shard` again"
            )

        self.objective = choose("objective", self.hyper.objective, OBJECTIVES)
        self.model = checkpoint.initial_model(self.config, self.hyper.seed)
        self.averaged = copy.deepcopy(self.model).requires_grad_(False) if self.hyper.ema_decay else None
        resumed = self._newest()
        if resumed is not None:
            state, progress = checkpoint.load_checkpoint(resumed, self.model)
            if self.averaged is not None:
                self.averaged.load_state_dict(state["averaged"], strict=True)
        self.replica = self._spread(self.model)
        self.weights = list(self.model.parameters())
        self.parameters = [weight for weight in self.weights if weight.requires_grad]
        self.optimizer = build_optimizer(self.model, self.hyper, params.compute.fused_optimizer)
        self.averages: list[Tensor] = []
        if self.averaged is not None:
            self.averaged = self._spread(self.averaged)
            self.averages = list(self.averaged.parameters())
        self.guard = Guard(self.optimizer, self.train_set, device, self.hyper.skip_nonfinite)

        self.done = 0  # updates
        self.saved = -1  # updates in the newest checkpoint
        self.since_row = torch.zeros(2, dtype=torch.float64, device=device)  # loss and count since the last row
        self.history: list[dict[str, float | int | None]] = []
        self.run_id: str | None = None
        self.total = Work()  # of all ranks, up to the newest row
        if resumed is not None:
            self._resume(state, progress)

        self.writer = checkpoint.Writer(self._store(resumed))
        self.pulse = Pulse(stop, self.hyper.checkpoint_minutes)
        self.meter = Meter(device)
        self.peak = peak_flops(device, self._bf16(), params.compute)
        self.advice = Advice(
            params.compute, self.hyper.block_samples, self.train_set.is_cached, free_cores(params.compute, device)
        )
        self.tracker: Tracker | None = None

    def _spread(self, model: nn.Module) -> nn.Module:
        compute = self.params.compute
        strategy.prepare_layers(model, compute)
        return strategy.spread(model, compute.strategy, self.device, self._bf16())

    def look(self, output: Path) -> list[str]:
        """What `preflight` finds that needs the model; raises UserError as it does."""
        ready = Ready(
            self.params,
            self.config,
            self.objective,
            self.model,
            self.optimizer,
            self.averages,
            self.train_set.images([0])[0],
            self.train_set.longest,
            self.device,
            self._autocast,
            output,
            self.work,
        )
        findings = look(ready.checks())
        self.meter.step_flops = ready.step_flops()
        return findings

    # -- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train from where the state is to the last step. Raises SystemExit, with a checkpoint saved, when stopped."""
        hyper, batches = self.hyper, on_device(iter(self._batches()), self.device)
        self.stop.hold()
        with self._bar() as bar:
            self.meter.lap()
            while self.done < hyper.steps:
                rate = learning_rate(self.done, hyper)
                set_learning_rate(self.optimizer, rate)
                sums, parts = self._gradients(batches)
                norm = scale_and_clip(self.parameters, self.world / sums[1].clamp(min=1), hyper.clip_norm)
                left_out = self.guard.judge(self.done, sums, norm, parts)
                self._update(left_out)
                self.done += 1
                self.since_row += sums.where(left_out == 0, 0.0)
                bar.update()
                if logged := self._due(hyper.log_every) or self._due(hyper.validate_every):
                    self._log(rate, bar)
                signal, overdue = self.pulse.beat(ask=logged)
                if signal or overdue or self._save_due():
                    self.save()
                if signal:
                    self._end_of_saving(needed=True)
                    log.warning(
                        "stopped after step %d with a checkpoint; the same command goes on from there", self.done
                    )
                    raise SystemExit(128 + signal)
            self._end_of_saving(needed=False)
        self.total += over_ranks(self.meter.lap())[0]
        log.info(self.total.summary(self.peak))

    def _gradients(self, batches: Iterator[Batch]) -> tuple[Tensor, list[tuple[list[str], Tensor]]]:
        """Add up the gradient of the summed loss over this update's micro-batches.

        Returns (loss, count) summed over all ranks, and the uids and loss of each of this rank's micro-batches.
        """
        own, parts = torch.zeros(2, dtype=torch.float64, device=self.device), []
        for part in range(self.hyper.accumulate):
            with self.meter.spent("data"):
                batch = next(batches)
            self.meter.count(batch)
            # layers that drop at random draw from torch's own generator
            torch.manual_seed(derive_seed(self.hyper.seed, self.done, "layers", batch.first))
            with strategy.exchange(self.replica, last=part == self.hyper.accumulate - 1):
                inputs = self._augmented(batch)
                with self._autocast():
                    loss, count = self.objective.loss(self.replica, inputs, self._draws(batch, "corruption"))
                loss.backward()
            own += torch.stack([loss.detach(), count])
            parts.append((batch.uids, loss.detach()))
        return dist.all_reduce_sum(own), parts

    def _draws(self, batch: Batch, stream: str) -> Draws:
        return Draws.at(
            self.hyper.seed, batch.step, stream, first=batch.first, total=batch.total, width=self.config.max_tokens
        )

    def _augmented(self, batch: Batch) -> TextImage:
        with self.meter.spent("move"):
            stored_BCHW = dist.to_device(batch.images_BCHW, self.device)
        images_BCHW = train_images(
            stored_BCHW,
            self.hyper.image_size,
            self.hyper.crop_min_area,
            self.hyper.flip,
            self._draws(batch, "augmentation"),
        )
        return TextImage(images_BCHW, batch.tokens_BL)

    @torch.no_grad()
    def _update(self, left_out: Tensor) -> None:
        """left_out: 1.0 where there is to be no update, else 0.0."""
        if self.params.compute.fused_optimizer or not left_out.item():  # the fused one reads it on the device
            self.optimizer.step()
        self.objective.constrain(self.model)
        self.optimizer.zero_grad(set_to_none=True)
        if self.averages:
            share = (1 - self.hyper.ema_decay) * (1 - left_out)  # a number would have to be asked of the device
            averages, weights = ([strategy.own(tensor) for tensor in some] for some in (self.averages, self.weights))
            torch._foreach_lerp_(averages, weights, [share] * len(averages))

    def _batches(self) -> TrainLoader:
        return TrainLoader(
            self.train_set,
            batch_size=self.hyper.batch_size,
            seed=self.hyper.seed,
            steps=range(self.done, self.hyper.steps),
            rank=self.rank,
            world=self.world,
            accumulate=self.hyper.accumulate,
            workers=self.params.compute.workers,
            block_samples=self.hyper.block_samples,
            caption_mix=self.hyper.caption_mix,
            pad_id=self.config.vocabulary.pad_id,
        )

    def _due(self, every: int) -> bool:
        return self.done % every == 0 or self.done == self.hyper.steps

    def _bf16(self) -> bool:
        wish = self.params.compute.precision
        return wish == "bf16" or (wish == "auto" and self.device.type == "cuda" and torch.cuda.is_bf16_supported())

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._bf16())

    # -- what is seen of it -------------------------------------------------------------------------------------------

    def _bar(self) -> "tqdm[None]":
        return tqdm(
            total=self.hyper.steps,
            initial=self.done,
            desc="pretrain",
            unit="step",
            disable=self.rank != 0,
            mininterval=0.5 if sys.stderr.isatty() else 3.0,
            dynamic_ncols=True,
        )

    def _log(self, rate: float, bar: "tqdm[None]") -> None:
        """Add a row to the loss curve and to the tracking; the one place where the host waits for the device."""
        self.guard.check()
        loss_sum, count = self.since_row.tolist()
        self.since_row.zero_()
        work, slowest = over_ranks(self.meter.lap())
        self.total += work
        images = self.done * self.hyper.batch_size
        row: dict[str, float | int | None] = {
            "step": self.done,
            "images": images,
            "train_loss": loss_sum / max(count, 1),
            "validation_loss": None,
            "lr": rate,
        }
        if self._due(self.hyper.validate_every):
            with self.meter.spent("validate"):
                row["validation_loss"] = self.validate()
        self.history.append(row)
        speed = work.metrics(max(1, self.params.compute.workers), self.peak)
        bar.set_postfix_str(
            f"loss {row['train_loss']:.3f}, {speed['images_per_s']:.0f} images/s, data {speed['time/data']:.0%}",
            refresh=False,
        )
        if advice := self.advice.on(work, slowest):
            log.warning(advice)
        if self.tracker is not None:
            self.tracker.log({**_losses(row), **speed, "left_out_updates": self.guard.told}, step=images)

    @torch.no_grad()
    def validate(self) -> float | None:
        """The loss on the validation split, or its first images, under the same corruption drawn once and for all.

        Each batch is judged by one rank alone and the sums are added in order, so that the number does not depend on
        the ranks. A rank that has none left repeats the last one, since all ranks take part in a sharded model's
        forward pass. None where the split is empty.
        """
        model = self.model if self.averaged is None else self.averaged
        dataset, size = self.validation_set, VALIDATION_BATCH
        end = min(len(dataset), self.hyper.validation_images)
        starts = range(0, end, size)
        sums_N2 = torch.zeros(len(starts), 2, dtype=torch.float64, device=self.device)
        model.eval()
        with dist.alone(), self._autocast():
            for turn in range(self.rank, math.ceil(len(starts) / self.world) * self.world, self.world):
                number = min(turn, len(starts) - 1)
                rows = range(starts[number], min(starts[number] + size, end))
                batch = dataset.batch(list(rows), self.config.vocabulary.pad_id, 0, len(rows), number)
                images_BCHW = eval_images(batch.images_BCHW.to(self.device), self.hyper.image_size)
                draws = Draws.at(self.hyper.seed, "validation", number, width=self.config.max_tokens)
                loss, count = self.objective.loss(model, TextImage(images_BCHW, batch.tokens_BL), draws)
                if turn == number:
                    sums_N2[number] = torch.stack([loss, count])
        strategy.reshard(model)
        model.train()
        loss_sum, total = dist.all_reduce_sum(sums_N2).sum(0).tolist()
        return loss_sum / total if total else None

    def summary(self) -> str:
        """One line on what runs, where, and from which step."""
        start = f"taken up again at step {self.done}" if self.done else "from step 0"
        weights = sum(parameter.numel() for parameter in self.parameters)
        spread = f"{self.params.compute.strategy}, " if self.world > 1 else ""
        precision = "bf16" if self._bf16() else self.params.compute.precision.replace("auto", "fp32")
        return (
            f"training {self.hyper.objective} ({self.hyper.preset}, {weights / 1e6:.1f} million weights) on "
            f"{len(self.train_set)} pairs, {self.world} x {self.device.type}, {spread}{precision}, {start} of "
            f"{self.hyper.steps}"
        )

    # -- state --------------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Take a checkpoint, unless this step has one, to be written beside the training. All ranks take part."""
        self.guard.check()
        if self.saved == self.done:
            return
        with self.meter.spent("save"):
            main = self.rank == 0
            state = {
                "optimizer": strategy.host_copy(optimizer_state(self.optimizer), keep=main),
                "averaged": None if self.averaged is None else self._whole(self.averaged),
            }
            weights = self._whole(self.model)
            if main:
                if self.tracker is not None:
                    self.run_id = self.tracker.run_id
                progress = {
                    "step": self.done,
                    "since_row": self.since_row.tolist(),
                    "history": self.history.copy(),
                    "run_id": self.run_id,
                    "left_out": self.guard.told,
                    "total": asdict(self.total),
                }
                self.writer.start(checkpoint.Snapshot(self.done, weights, state, progress))
            dist.barrier()
        self.saved = self.done
        self.pulse.rest()

    def _whole(self, model: nn.Module) -> dict[str, Any]:
        """A copy of the weights in the memory of rank 0's host. All ranks take part."""
        return strategy.host_copy(model.state_dict(), keep=self.rank == 0)

    def _save_due(self) -> bool:
        return self.done % self.hyper.checkpoint_every == 0 or (
            self.hyper.keep_every > 0 and self.done % self.hyper.keep_every == 0
        )

    def _end_of_saving(self, needed: bool) -> None:
        """Wait for the checkpoint that is being written. needed: raise OSError if it does not come about."""
        with self.meter.spent("save"):
            if self.rank == 0:
                self.writer.wait(needed)
            dist.barrier()

    def _store(self, resumed: Path | None) -> checkpoint.Store:
        """resumed: the checkpoint that was taken up; newer ones have been found damaged."""
        damaged = {folder for folder in checkpoint.step_folders(self.work) if resumed is None or folder > resumed}
        return checkpoint.Store(
            self.work,
            self.config,
            self.tokenizer_path,
            self.hyper.keep_checkpoints,
            self.hyper.keep_every,
            frozenset(damaged),
        )

    def _newest(self) -> Path | None:
        """The newest good checkpoint, the same one on every rank."""
        newest = checkpoint.newest_checkpoint(self.work) if self.rank == 0 else None
        return dist.gather_objects(newest)[0]

    def _resume(self, state: dict[str, Any], progress: dict[str, Any]) -> None:
        """Take up what was saved; the weights have been loaded."""
        restore_optimizer(self.optimizer, state["optimizer"])
        self.done = self.saved = progress["step"]
        self.since_row += torch.tensor(progress["since_row"], dtype=torch.float64, device=self.device)
        self.history, self.run_id = progress["history"], progress["run_id"]
        self.total = Work(**progress["total"])
        self.guard.resume(progress["left_out"])

    def whole_model(self) -> dict[str, Tensor]:
        """The trained weights, or their average, on rank 0's host. All ranks take part."""
        return self._whole(self.model if self.averaged is None else self.averaged)

    def write(self, weights: dict[str, Tensor], output: Path) -> str:
        """Write the trained model and its loss curve as the folder `output`; returns the model's fingerprint."""
        images = self.done * self.hyper.batch_size
        with files.whole_folder(output) as temporary:
            checkpoint.save_model(temporary, weights, self.config, self.tokenizer_path)
            write_curve(temporary / "loss.csv", self.history)
            made = checkpoint.fingerprint(temporary)
            files.write_manifest(
                temporary,
                inputs={
                    "shards": files.sha256(self.shards / files.MANIFEST),
                    "params": files.fingerprint(self.hyper.model_dump(exclude=BOOKKEEPING)),
                },
                counts={"steps": self.done, "images": images, "passes": round(images / len(self.train_set), 3)},
                fingerprint=made,
            )
        # beside the output, whose bytes tell nothing of the machine
        cost = {"fingerprint": made, "images": images, "ranks": self.world, **self.total.cost(self.peak)}
        files.write_json(self.work.with_name(COST), cost)
        return made


def write_curve(path: Path, history: list[dict[str, float | int | None]]) -> None:
    """The loss curve as csv; an empty cell where nothing was measured."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row in history:
            cells = {name: f"{value:.9g}" if isinstance(value, float) else value for name, value in row.items()}
            writer.writerow(cells)


def _losses(row: dict[str, float | int | None]) -> dict[str, float]:
    """What is tracked of a row of the loss curve."""
    values = {"train/loss": row["train_loss"], "validation/loss": row["validation_loss"], "lr": row["lr"]}
    return {name: value for name, value in values.items() if value is not None}


@contextlib.contextmanager
def _tracked(trainer: Trainer, failure: Path) -> Iterator[Tracker | None]:
    """The MLflow run around a training; its status tells how the training ended."""
    params, run = trainer.params, trainer.work / RUN
    if trainer.rank != 0 or not params.tracking.uri:
        yield None
        return
    tags = {
        "mdc.data_version": trainer.train_set.version,
        "mdc.git_commit": git_commit(),
        "mdc.objective": params.pretrain.objective,
        "mdc.preset": params.pretrain.preset,
        "mdc.training": trainer.work.name,
    }
    known = files.read_json(run)["run_id"] if run.is_file() else trainer.run_id
    unsent = trainer.work.with_name(f"unsent-{trainer.work.name}.jsonl")
    data = TrackedData(trainer.shards, trainer.train_set.version, len(trainer.train_set))
    trainer.tracker = tracker = Tracker(params, tags, data, known, run, unsent)
    for row in trainer.history:  # what the server has missed before a restart
        tracker.log(_losses(row), step=int(row["images"] or 0))
    try:
        yield tracker
    except SystemExit:
        tracker.finish("FAILED" if failure.exists() else "KILLED", patience_s=STOP_PATIENCE_S)
        raise
    except Exception:
        tracker.finish("FAILED", patience_s=STOP_PATIENCE_S)
        raise
    tracker.finish("FINISHED")


def _prepare(work: Path, failure: Path) -> None:
    """Make the work folder, and say whether there is something to take up again."""
    work.mkdir(parents=True, exist_ok=True)
    failure.unlink(missing_ok=True)
    for half in work.glob(".step-*.tmp"):
        shutil.rmtree(half, ignore_errors=True)
    others = [str(other) for other in sorted(work.parent.glob("pretrain-*")) if other != work]
    if others and not checkpoint.step_folders(work):
        log.info(
            "%s are left over from other data or parameters and not used (remove them if they are not needed)",
            ", ".join(others),
        )


def train(params: Params, shards: Path, output: Path, runs: Path, launched: bool = False) -> None:
    """Train as one rank of the group that torchrun describes, and write the checkpoint folder `output`.

    runs: where the folder for work in progress lies, named by a fingerprint of data and parameters; a training that was
    stopped there is taken up again, and the folder is removed when all is done. launched: see `failures_recorded`.
    Raises UserError for bad input, FloatingPointError where the loss is not finite, SystemExit(128 + signal) after
    SIGTERM or SIGINT, with a checkpoint saved.
    """
    device = dist.pick_device(params.compute.device)
    work = work_folder(params, shards, runs)
    failure = work / FAILURE
    with Stop(failure) as stop, dist.process_group(device, params.compute.rank_timeout):
        if dist.is_main():
            _prepare(work, failure)
        dist.barrier()
        with failures_recorded(failure, launched), strategy.kernels(params.compute):
            findings = look(Place(params, shards, output, work).checks()) if params.compute.preflight else []
            trainer = Trainer(params, shards, work, device, stop)
            if params.compute.preflight:
                findings += trainer.look(output)
                log.info("preflight: %s", ", ".join(findings))
            if dist.is_main():
                log.info(trainer.summary())
            with _tracked(trainer, failure) as tracker, logging_redirect_tqdm():
                trainer.run()
                weights = trainer.whole_model()
                if dist.is_main():
                    made = trainer.write(weights, output)
                    if tracker is not None:
                        tracker.deliver(output, made)
            if dist.is_main():
                trainer.writer.store.close()
