"""What a training looks at before its first step, so that it is refused within seconds and not ended within days.

Every rank takes part. A check returns a few words on what it found, or raises UserError with the fix; those of all
checks and all ranks are told together. Nothing that is looked at changes a number of the training.
"""

import logging
import platform
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar, cast

import psutil
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mdc import dist, files
from mdc.config import CONTRASTIVE, ModelConfig, Params, pairs_in_share
from mdc.data.captions import SPLITS
from mdc.data.shards import read_index, verify_shards
from mdc.data.transforms import train_images
from mdc.draws import Draws
from mdc.errors import UserError
from mdc.objectives import Objective, TextImage
from mdc.train import strategy
from mdc.train.checkpoint import step_folders
from mdc.train.speed import StepFlops

log = logging.getLogger(__name__)

PACKAGES = ("torch", "timm", "tokenizers", "numpy")  # on which the numbers of a training depend
COUNTED_ROWS = 4  # images whose operations are counted
# Share of a host's free memory that may be counted on: a step of small ViTs took up to 1.2 times what its tensors hold,
# since the allocator keeps pieces. With activation checkpointing it was 2.2 times, of which only blocks up to 32 MB are
# kept: those of larger models are given back.
COUNTED_ON = 0.8

Check = Callable[[], str]
T = TypeVar("T")


def size(count: float) -> str:
    """Bytes in words."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def look(checks: Sequence[Check]) -> list[str]:
    """Make all checks on every rank; returns this rank's findings, "" left out.

    Raises UserError, the same on every rank, with every problem of any rank. A check must not wait for other ranks
    after it has found a problem.
    """
    findings, problems = [], []
    for check in checks:
        try:
            findings.append(check())
        except UserError as problem:
            problems.append(str(problem))
    everywhere = dict.fromkeys(problem for own in dist.gather_objects(problems) for problem in own)
    if everywhere:
        raise UserError("\n".join(everywhere))
    return [finding for finding in findings if finding]


# -- before the model is built ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """What a training reads and where it writes."""

    params: Params
    shards: Path
    output: Path
    work: Path

    def checks(self) -> list[Check]:
        return [self.agreement, self.shards_whole, self.samples, self.folders]

    def agreement(self) -> str:
        """All ranks read the same parameters and data with the same software."""
        own = {
            "Python": platform.python_version(),
            **{name: version(name) for name in PACKAGES},
            "parameters": files.fingerprint(self.params.model_dump()),
            "data version": read_index(self.shards)["version"],
        }
        everywhere: list[tuple[str, Mapping[str, str]]] = dist.gather_objects((socket.gethostname(), own))
        first_host, first = everywhere[0]
        problems = [
            f"rank {rank} on {host} has {name} {theirs[name]}, rank 0 on {first_host} has {first[name]}"
            for rank, (host, theirs) in enumerate(everywhere)
            for name in own
            if theirs[name] != first[name]
        ]
        if problems:
            raise UserError("\n".join(problems) + "\nGive all hosts the same installation, parameters and shards")
        return f"{len(everywhere)} ranks agree" if len(everywhere) > 1 else ""

    def shards_whole(self) -> str:
        """Rank 0 reads the shards up to a limit, a draw of them beyond; every other host compares counts and sizes."""
        if dist.local_rank():
            return ""
        for name, recorded in files.read_manifest(self.shards, made_by="shard")["files"].items():
            path = self.shards / name
            if not name.endswith(".tar") and (not path.is_file() or files.sha256(path) != recorded["sha256"]):
                raise UserError(f"{path} is not what was written; run `mdc stage shard` again")
        counts = verify_shards(self.shards, read_up_to=files.READ_UP_TO if dist.is_main() else 0)
        return f"shards whole ({', '.join(f'{counts[split]:,} {split}' for split in SPLITS)})"

    def samples(self) -> str:
        """There is at least one batch without a picture twice, and something to validate with where that is asked."""
        counts = {
            split: sum(record["samples"] for record in records)
            for split, records in read_index(self.shards)["splits"].items()
        }
        pretrain = self.params.pretrain
        pairs = pairs_in_share(counts["train"], pretrain.data_share) if counts["train"] else 0
        if pairs < pretrain.batch_size:
            raise UserError(
                f"pretrain.batch_size {pretrain.batch_size} is more than the {pairs} pairs to train on in "
                f"{self.shards}: a batch would hold a picture twice; lower it, or raise pretrain.data_share, or bring "
                "more data"
            )
        if not counts["validation"] and self.params.caption.validation_share and dist.is_main():
            log.warning("%s has no validation split, so that the loss on unseen pictures is not known", self.shards)
        return ""

    def folders(self) -> str:
        """Rank 0 can write where it must, and every host sees the same folder for checkpoints."""
        mark = f".seen-{uuid.uuid4().hex}"
        problem = _unwritable([self.output.absolute().parent, self.work], mark) if dist.is_main() else ""
        mark, problem = dist.gather_objects((mark, problem))[0]
        seen = (self.work / mark).is_file()
        dist.barrier()
        if dist.is_main():
            (self.work / mark).unlink(missing_ok=True)
        if problem:
            raise UserError(problem)
        if not seen:
            raise UserError(
                f"{socket.gethostname()} does not see in {self.work} what rank 0 wrote there; paths.runs must lie on "
                "storage that all hosts share"
            )
        return ""


def _unwritable(folders: Sequence[Path], mark: str) -> str:
    """Why one of the folders takes no file, "" if all do; the last one keeps an empty file of this name."""
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / mark).touch()
            if folder != folders[-1]:
                (folder / mark).unlink()
        except OSError as error:
            return f"{folder} cannot be written ({error.strerror}); change its rights, or paths.outputs or paths.runs"
    return ""


# -- with the model ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ready:
    """A training that could begin. model: as it is laid out over ranks, without what exchanges gradients."""

    params: Params
    config: ModelConfig
    objective: Objective
    model: nn.Module
    optimizer: torch.optim.Optimizer
    averages: Sequence[Tensor]
    picture: Tensor  # uint8 `[C, H, W]`, as stored
    longest: int  # tokens of a caption
    device: torch.device
    autocast: Callable[[], AbstractContextManager[object]]
    output: Path
    work: Path

    def checks(self) -> list[Check]:
        return [self.disk, self.memory]

    @property
    def rows(self) -> int:
        """Images of a micro-batch on one rank."""
        pretrain = self.params.pretrain
        return pretrain.batch_size // (dist.world_size() * pretrain.accumulate)

    # -- disk

    def disk(self) -> str:
        """There is room for the checkpoints that will be kept, the one that is being written, and the output."""
        weights = sum(tensor.numel() * tensor.element_size() for tensor in self.model.state_dict().values())
        if not dist.is_main():
            return ""
        pretrain, averaged = self.params.pretrain, bool(self.averages)
        for_good = pretrain.steps // pretrain.keep_every if pretrain.keep_every else 0
        checkpoints = (pretrain.keep_checkpoints + 1 + for_good) * weights * (4 if averaged else 3)
        there = sum(file.stat().st_size for folder in step_folders(self.work) for file in folder.glob("*"))
        needs = {self.work: max(0, checkpoints - there), self.output.absolute().parent: weights}
        disks: dict[int, tuple[Path, int]] = {}
        for folder, need in needs.items():
            first, before = disks.get(folder.stat().st_dev, (folder, 0))
            disks[folder.stat().st_dev] = (first, before + need)
        for folder, need in disks.values():
            free = shutil.disk_usage(folder).free
            if need > free:
                raise UserError(
                    f"{folder}: checkpoints and model need {size(need)}, of which {size(free)} are free; "
                    "make room, set paths.runs to another disk, or lower pretrain.keep_checkpoints or raise "
                    "pretrain.keep_every"
                )
        folder, need = disks[self.work.stat().st_dev]
        return f"disk {size(need)} of {size(shutil.disk_usage(folder).free)} free"

    # -- memory

    def memory(self) -> str:
        """A micro-batch with the longest caption fits, beside gradients and what the optimiser remembers.

        A few images tell what a micro-batch keeps for its backward pass. On a GPU a whole one follows. On a CPU it
        does not, since the kernel would end the process rather than refuse; nor with a sharded model, where a rank
        without memory would leave the others waiting.
        """
        need = self.needed()
        total, free = need.of(self.rows), free_memory(self.device)
        ranks = [(socket.gethostname(), total, used_memory(self.device))]
        if self.device.type == "cpu":  # ranks of one host share its memory
            ranks = [rank for rank in dist.gather_objects(ranks[0]) if rank[0] == socket.gethostname()]
        total, used = sum(rank[1] for rank in ranks), sum(rank[2] for rank in ranks)
        limit = COUNTED_ON * free if self.device.type == "cpu" else free
        fits = all(dist.gather_objects(total <= limit))
        if fits and self.device.type == "cuda" and self.params.compute.strategy == "ddp":
            total = self._whole(need, free)
        if total > limit:
            raise UserError(self._too_much(need, free, len(ranks)))
        return f"memory {size(used + total)} of {size(used + free)}"

    def needed(self) -> "Need":
        """Measured with one image and with two; gradients, two moments of each weight and a checkpoint come to it."""
        one, two = (self._kept(rows) + self._recomputed(rows) for rows in (1, 2))
        own = [strategy.own(parameter) for parameter in self.model.parameters() if parameter.requires_grad]
        weights = sum(tensor.numel() * tensor.element_size() for tensor in own)
        has = sum(
            tensor.numel() * tensor.element_size()
            for state in self.optimizer.state.values()
            for tensor in map(strategy.own, state.values())
        )
        remembered = max(0, 2 * weights - has)
        fixed = 2 * one - two + weights + remembered + self._snapshot()
        return Need(fixed=fixed, per_image=two - one, remembered=remembered)

    def _snapshot(self) -> int:
        """Bytes of this device that a checkpoint takes while it is written: a copy of all that it holds, and one of
        the weights as the file has them; 0 where that is the memory of another device."""
        if self.device.type != "cpu" or not dist.is_main():
            return 0
        whole = sum(parameter.numel() * parameter.element_size() for parameter in self.model.parameters())
        return (5 if self.averages else 4) * whole

    def _kept(self, rows: int) -> int:
        """Bytes that a forward pass keeps for the backward pass, weights apart."""
        with self._dry():
            loss, kept = self._saved(lambda: self._loss(rows, self.longest))
            loss.backward()
        self._forget()
        return kept

    def _recomputed(self, rows: int) -> int:
        """Bytes that the largest layer keeps while the backward pass computes it again; 0 where none is."""
        if not self.params.compute.activation_checkpointing:
            return 0
        sizes = []

        def measure(layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            with torch.enable_grad():
                sizes.append(self._saved(lambda: cast(Callable[..., Any], layer.keeping)(*args, **options))[1])

        hooks = [layer.register_forward_pre_hook(measure, with_kwargs=True) for layer in strategy.layers(self.model)]
        with self._dry(), torch.no_grad():
            self._loss(rows, self.longest)
        for hook in hooks:
            hook.remove()
        strategy.reshard(self.model)
        return max(sizes)

    def _saved(self, action: Callable[[], T]) -> tuple[T, int]:
        """What `action` returns, and the bytes that it keeps for its backward pass, weights apart."""
        weights = {strategy.own(parameter).untyped_storage().data_ptr() for parameter in self.model.parameters()}
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = strategy.own(tensor).untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            result = action()
        return result, sum(kept.values())

    def _whole(self, need: "Need", free: int) -> int:
        """Bytes that a whole micro-batch and the optimiser take on a GPU. Raises UserError where they do not fit."""
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        try:
            with self._dry():
                self._loss(self.rows, self.longest).backward()
        except torch.cuda.OutOfMemoryError:
            raise UserError(self._too_much(need, free, ranks=1)) from None
        finally:
            self._forget()
        return torch.cuda.max_memory_allocated(self.device) - before + need.remembered

    def _forget(self) -> None:
        self.model.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _too_much(self, need: "Need", free: int, ranks: int) -> str:
        """ranks: that share the memory."""
        pretrain, compute, world = self.params.pretrain, self.params.compute, dist.world_size()
        fit, share = min(need.images(COUNTED_ON * free / ranks), self.rows - 1), pretrain.batch_size // world
        parts = next((n for n in range(2, share + 1) if share % n == 0 and share // n <= fit), 0)
        if pretrain.objective in CONTRASTIVE:
            remedies = [f"lower pretrain.batch_size to {fit * world}"] if fit > 0 else []
        else:
            remedies = [f"set pretrain.accumulate: {parts} ({share // parts} images at once)"] if parts else []
        if not compute.activation_checkpointing:
            remedies.append("set compute.activation_checkpointing: true")
        if compute.strategy == "ddp" and world > 1:
            remedies.append("set compute.strategy: fsdp")
        if ranks > 1:
            remedies.append("use fewer compute.processes on one machine")
        where = f"{socket.gethostname()} ({ranks} ranks)" if ranks > 1 else f"{self.device} of {socket.gethostname()}"
        return (
            f"{self.rows} images at once need about {size(ranks * need.of(self.rows))} beside the model, and "
            f"{where} has {size(free)} free; {', or '.join(remedies or ['take a smaller model'])}"
        )

    # -- operations

    def step_flops(self) -> StepFlops:
        """The operations of an image and of a token, from the forward pass at two lengths of caption.

        The backward pass takes twice as many as the forward pass; what is computed again for it does not count.
        """
        rows = min(COUNTED_ROWS, self.rows)
        long = self._forward_flops(rows, self.longest)
        short = self._forward_flops(rows, 1)
        per_token = (long - short) / max(self.longest - 1, 1)
        return StepFlops(per_image=3 * (short - per_token) / rows, per_token=3 * per_token / rows)

    def _forward_flops(self, rows: int, length: int) -> int:
        with self._dry(), torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            self._loss(rows, length)
        strategy.reshard(self.model)
        return counter.get_total_flops()

    # -- a step that leaves no trace

    @contextmanager
    def _dry(self) -> Iterator[None]:
        """Without compiling anything, and without a draw from torch's own generators."""
        devices = [self.device] if self.device.type == "cuda" else []
        with dist.alone(), torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
            yield

    def _loss(self, rows: int, length: int) -> Tensor:
        """Of one picture again and again, with captions of `length` tokens."""
        pretrain, vocabulary = self.config.pretrain, self.config.vocabulary
        draws = [Draws.at(pretrain.seed, "dry", total=rows, width=self.config.max_tokens) for _ in range(2)]
        pictures_BCHW = self.picture.to(self.device).expand(rows, -1, -1, -1)
        images_BCHW = train_images(pictures_BCHW, pretrain.image_size, pretrain.crop_min_area, pretrain.flip, draws[0])
        tokens_BL = torch.full((rows, length), vocabulary.unk_id)
        tokens_BL[:, -1] = vocabulary.eos_id
        with self.autocast():
            loss, _ = self.objective.loss(self.model, TextImage(images_BCHW, tokens_BL), draws[1])
        return loss


@dataclass(frozen=True)
class Need:
    """Bytes that a step takes beside the model: `fixed`, of which `remembered` by the optimiser, and per image."""

    fixed: int
    per_image: int
    remembered: int

    def of(self, images: int) -> int:
        return self.fixed + images * self.per_image

    def images(self, free: float) -> int:
        """How many fit; 0 if none does."""
        return max(0, int((free - self.fixed) // max(self.per_image, 1)))


def used_memory(device: torch.device) -> int:
    """Bytes that this process has taken of the device."""
    if device.type == "cpu":
        return int(psutil.Process().memory_info().rss)
    return torch.cuda.memory_allocated(device)


def free_memory(device: torch.device) -> int:
    """Bytes that are left to this process, and on a CPU to all others."""
    if device.type == "cpu":
        return min([int(psutil.virtual_memory().available), *_left_in_groups()])
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _left_in_groups(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[int]:
    """Bytes up to the memory limits of the control groups (version 2) that hold this process, as Slurm and
    Kubernetes set them; none where there is no limit."""
    names = [line.removeprefix("0::").strip("/") for line in own.read_text().splitlines() if line.startswith("0::")]
    left = []
    for group in (folder for name in names for folder in ((root / name), *(root / name).parents)):
        limit = group / "memory.max"
        if limit.is_file() and (most := limit.read_text().strip()) != "max":
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            cached = int(stat["inactive_file"])  # files that the kernel lets go of
            left.append(int(most) - int((group / "memory.current").read_text()) + cached)
    return left
