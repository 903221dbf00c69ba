"""Typed parameters, one class per stage, and every rule that ties two of them together.

`params.yaml` is read here and nowhere else. It is read as YAML 1.2, as DVC reads it, so that `1e-4` is a number
for both. Types are strict: a quoted "0.1" is not a number and an unknown key is an error that names the close match.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedSeq
from ruamel.yaml.error import YAMLError

from mdc.errors import UserError
from mdc.files import whole_file
from mdc.layouts import LAYOUTS
from mdc.presets import PRESETS

STAGES = ("download", "caption", "shard", "pretrain", "extract", "evaluate", "report")

ObjectiveName = Literal["mdc", "cmlm", "bert", "autoregressive", "cappa", "clip", "siglip"]
CONTRASTIVE = ("clip", "siglip")
CAUSAL = ("autoregressive", "cappa")

T = TypeVar("T")


class Section(BaseModel):
    """Base of all parameter classes: strict types, unknown keys fail, values do not change."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


SectionT = TypeVar("SectionT", bound=Section)


class PathParams(Section):
    """Where the pipeline keeps what it makes, relative to the project folder."""

    data: str = "data"  # downloads, captions, shards
    outputs: str = "outputs"  # model, features, scores, report
    runs: str = "runs"  # checkpoints of trainings under way; not versioned
    cache: str = ""  # features that are kept by a hash of weights, transform and data; "" = features within runs

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, root in self:
            self.check_outside(name, root)
        return self

    def check_outside(self, name: str, place: str) -> None:
        """Raise ValueError for a place in a folder that a stage makes anew."""
        made = [Path(self.data) / name for name in ("downloaded", "captions", "shards")]
        made += [Path(self.outputs) / name for name in ("model", "features", "evaluation", "report")]
        for folder in map(Path.absolute, made):
            if Path(place).absolute().is_relative_to(folder):
                raise ValueError(f"{name} {place} lies in {folder}, which a stage replaces; take another folder")

    @property
    def kept(self) -> Path:
        """The folder of `cache`."""
        return Path(self.cache) if self.cache else Path(self.runs) / "features"


class DownloadParams(Section):
    """From a list of URLs to images stored at training size."""

    layout: str = "pairs"  # by name in mdc.layouts: what the fields that are missing or null become
    kind: Literal["urls", "images", "webdataset"] = "urls"  # lists to download, or pictures that are here already
    # a file, a folder or a pattern, here or at any address that fsspec reads
    input: str = Field("data/sample/urls.parquet", min_length=1)
    header: list[str] = []  # names of the columns of csv and tsv files that have no line of names
    url_column: str = "url"  # images: of the metadata file, with paths
    caption_column: str | list[str] = "caption"  # one or several, the first is the main one; "" = none
    uid_column: str = ""  # "" = a hash of URL and captions
    label_column: str = ""  # class for probes; "" = none
    line_breaks: Literal["drop", "space"] = "drop"  # what becomes of a caption with a tab or line break
    group_column: str = ""  # rows of one group never straddle a split; "" = the image's own content
    image_size: int = Field(40, ge=8, le=4096)  # stored size of the shorter side, pixels
    image_format: Literal["jpg", "png", "webp"] = "jpg"
    image_quality: int = Field(95, ge=1, le=100)  # of jpg and webp
    background: list[Annotated[int, Field(ge=0, le=255)]] = Field(  # RGB under transparent pixels
        [255, 255, 255], min_length=3, max_length=3
    )
    min_side: int = Field(8, ge=1)  # pixels of the shorter side; smaller pictures are refused
    max_pixels: int = Field(100_000_000, ge=1)  # larger pictures are refused before they are decoded
    max_aspect_ratio: float = Field(4.0, ge=1)  # longer side over shorter side
    max_bytes: int = Field(50_000_000, ge=1)  # of one response body
    timeout: float = Field(10.0, gt=0)  # seconds without a byte
    deadline: float = Field(30.0, gt=0)  # seconds for one image in all, waiting for a turn not counted
    retries: int = Field(1, ge=0)
    per_host: int = Field(16, ge=0)  # requests to one host at a time, over all processes; 0 = no limit
    longest_wait: float = Field(60.0, ge=0)  # seconds that a host may ask to be left alone (Retry-After) within a run
    robots: bool = True  # heed robots.txt
    opt_out: list[str] = ["noai", "noimageai", "noindex", "noimageindex", "none"]  # X-Robots-Tag heeded; [] = none
    samples_per_shard: int = Field(1000, ge=1)
    min_success_rate: float = Field(0.5, ge=0, le=1)  # share of rows below which the stage fails
    user_agent: str = Field("mdc/0.1 (img2dataset)", min_length=1)

    @property
    def caption_columns(self) -> list[str]:
        """The columns of captions, the main one first."""
        columns = [self.caption_column] if isinstance(self.caption_column, str) else self.caption_column
        return [column for column in columns if column]

    @model_validator(mode="before")
    @classmethod
    def _fill_from_layout(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        name = data.get("layout") or "pairs"
        if name not in LAYOUTS:
            raise ValueError(f"unknown layout {name!r}{_close(str(name), LAYOUTS)}; one of: {', '.join(LAYOUTS)}")
        return {**LAYOUTS[name], **{key: value for key, value in data.items() if value is not None}}

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, columns in (("header", self.header), ("caption_column", self.caption_columns)):
            if len(set(columns)) < len(columns):
                raise ValueError(f"{name} {columns} names a column twice")
        if not self.url_column:
            raise ValueError('url_column "" names no column; name the one with the addresses')
        return self


class CaptionParams(Section):
    """Tokens, the length filter, and the split."""

    tokenizer: str = Field("train", min_length=1)  # "train", a folder with tokenizer.json, or a Hugging Face name
    vocab_size: int = Field(2000, ge=32)  # of a trained tokenizer, specials included
    lowercase: bool = True  # of a trained tokenizer
    min_tokens: int = Field(2, ge=1)  # specials included
    max_tokens: int = Field(12, ge=2)  # specials included
    too_long: Literal["drop", "truncate"] = "drop"

    # how texts are written
    unicode_form: Literal["", "NFC", "NFKC"] = "NFC"  # "" = as they come
    html_entities: bool = True  # "&amp;" becomes "&"
    collapse_spaces: bool = True  # runs of white space and control characters become one space

    # which texts are left out
    languages: list[str] = []  # kept, as [en, de]; [] = all; needs the extra `language`
    min_letters: float = Field(0.0, ge=0, le=1)  # share of letters among the characters that are no spaces
    max_repetition: float = Field(1.0, gt=0, le=1)  # share of word pairs that occur earlier in the caption
    blocklist: str = ""  # file with a word or phrase per line; "" = none

    # which pictures are left out
    max_repeats: int = Field(7, ge=1)  # rows with one picture; above it, the picture stands for a missing one
    alike: Literal["together", "drop"] = "together"  # pictures that are alike: in one split, or the first alone
    alike_bits: int = Field(7, ge=-1, le=15)  # of 256 of a perceptual hash in which they may differ; -1 = same file
    exclude: str = ""  # folder of evaluation pictures, or file with a path per line, to be left out; "" = none

    tokenizer_captions: int = Field(10_000_000, ge=1)  # at most, that a tokenizer is trained on
    validation_share: float = Field(0.1, ge=0, lt=1)
    test_share: float = Field(0.1, ge=0, lt=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}; lower it")
        if self.validation_share + self.test_share >= 1:
            raise ValueError("validation_share + test_share leave nothing to train on; their sum must be below 1")
        return self


class ShardParams(Section):
    """The final WebDataset shards."""

    samples_per_shard: int = Field(1000, ge=1)
    seed: int = Field(0, ge=0)  # of the global shuffle
    target: str = ""  # another folder, or a URL such as s3://bucket/pairs, for the tars; "" = beside their index


class PretrainParams(Section):
    """Objective, architecture and optimisation. A field that is missing or null takes the preset's value."""

    preset: str = "nano"
    objective: ObjectiveName = "mdc"
    seed: int = Field(0, ge=0)

    # the objective's own knobs (METHOD sections 2 and 3)
    t_min: float = Field(0.5, ge=0, le=1)  # mdc, cmlm: smallest masking ratio
    t_max: float = Field(1.0, gt=0, le=1)  # mdc, cmlm: largest masking ratio
    t_floor: float = Field(0.001, gt=0, lt=1)  # mdc: smallest t drawn where t_min is below it, keeps 1/t finite
    stratified_t: bool = True  # mdc, cmlm: spread t evenly over the global batch
    exact_count: bool = False  # cmlm: mask exactly n ~ U{1..N} tokens
    bert_ratio: float = Field(0.15, gt=0, le=1)  # bert: share of masked tokens
    bert_80_10_10: bool = False  # bert: 80 % [MASK], 10 % random, 10 % kept
    cappa_parallel: float = Field(0.75, ge=0, le=1)  # cappa: share of examples predicted in parallel
    max_logit_scale: float = Field(100.0, gt=0)  # clip: cap of the learned inverse temperature
    image_drop: float = Field(0.0, ge=0, lt=1)  # share of examples without image, for guidance

    # architecture
    image_size: int = Field(ge=8, le=4096)  # pixels, square
    encoder: str  # a timm ViT by name
    encoder_options: dict[str, int | float | str | bool] = {}  # passed to timm.create_model
    encoder_pretrained: bool = False  # start from timm's weights
    decoder_width: int = Field(ge=8)
    decoder_depth: int = Field(ge=1)
    decoder_heads: int = Field(ge=1)
    embed_dim: int = Field(ge=8)  # clip, siglip: of the shared space

    # optimisation
    data_share: float = Field(1.0, gt=0, le=1)  # of the training pairs, by a hash of the uid: smaller lie in larger
    caption_mix: dict[str, Annotated[float, Field(ge=0)]] = {}  # by source: how often it is drawn; {} = alike
    steps: int = Field(ge=1)
    batch_size: int = Field(ge=1)  # images per update, over all ranks
    accumulate: int = Field(1, ge=1)  # micro-batches per update
    block_samples: int = Field(1, ge=1)  # that lie together in a shard and are read at once; 1 = a full shuffle
    lr: float = Field(gt=0)  # peak of AdamW's learning rate
    warmup_steps: int = Field(ge=0)
    weight_decay: float = Field(ge=0)
    beta2: float = Field(0.95, gt=0, lt=1)
    clip_norm: float = Field(1.0, gt=0)  # largest global gradient norm
    ema_decay: float = Field(0.0, ge=0, lt=1)  # 0 = no moving average of the weights

    # augmentation
    crop_min_area: float = Field(0.5, gt=0, le=1)  # smallest share of the picture in a random resized crop
    flip: bool = False  # mirror at random; off, since captions name left and right

    # bookkeeping
    log_every: int = Field(20, ge=1)  # steps
    validate_every: int = Field(250, ge=1)  # steps
    validation_images: int = Field(5_000, ge=1)  # at most, the first of the validation split
    checkpoint_every: int = Field(500, ge=1)  # steps
    checkpoint_minutes: float = Field(0.0, ge=0)  # also after so many minutes without one; 0 = by steps alone
    keep_checkpoints: int = Field(2, ge=1)  # the newest
    keep_every: int = Field(0, ge=0)  # steps; such a checkpoint is made and kept for good; 0 = none
    skip_nonfinite: int = Field(0, ge=0)  # updates without a finite loss that a training may leave out; 0 = stop

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        name = data.get("preset") or "nano"
        if name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}{_close(str(name), PRESETS)}; one of: {', '.join(PRESETS)}")
        return {**PRESETS[name], **{key: value for key, value in data.items() if value is not None}}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.t_min >= self.t_max:
            raise ValueError(f"t_min {self.t_min} must be below t_max {self.t_max}: t is drawn between them")
        if self.t_max <= self.t_floor:
            raise ValueError(f"t_max {self.t_max} must be above t_floor {self.t_floor}")
        if self.batch_size % self.accumulate:
            raise ValueError(f"batch_size {self.batch_size} does not divide into accumulate {self.accumulate} parts")
        if self.objective in CONTRASTIVE and self.accumulate > 1:
            raise ValueError(
                f"accumulate {self.accumulate} with objective {self.objective}: every image of the batch is a "
                "negative for every other, so the batch cannot be taken in parts; set accumulate: 1"
            )
        if self.objective in CONTRASTIVE and self.image_drop > 0:
            raise ValueError(f"image_drop {self.image_drop} has no meaning for objective {self.objective}; set 0")
        if self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} must be below steps {self.steps}")
        if self.decoder_width % self.decoder_heads:
            raise ValueError(f"decoder_width {self.decoder_width} is no multiple of decoder_heads {self.decoder_heads}")
        return self


def pairs_in_share(pairs: int, share: float) -> int:
    """How many of the training pairs `pretrain.data_share` takes."""
    return max(1, round(share * pairs))


class ExtractParams(Section):
    """Frozen features and their index."""

    batch_size: int = Field(256, ge=1)
    layer: int | None = None  # block of the encoder, from 0 or, from its end, -1; None = the last
    floors: bool = True  # also the untrained encoder and raw pixels
    pixel_size: int = Field(16, ge=1)  # side of the pictures whose raw pixels are the floor


class EvaluateParams(Section):
    """Probes, compositional pairs, captions and neighbours. Everything is chosen on a part of train."""

    probe_learning_rates: list[Annotated[float, Field(gt=0)]] = Field([0.01, 0.03], min_length=1)
    probe_weight_decays: list[Annotated[float, Field(ge=0)]] = Field(  # L2 penalties on standardised features
        [1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0], min_length=1
    )
    probe_epochs: int = Field(0, ge=0)  # passes over train; 0 = 60, more below 2,560 rows, 4 to 59 above 17,000
    probe_seeds: int = Field(3, ge=1)
    probe_holdout: float = Field(0.2, gt=0, lt=1)  # share of train on which the grid is judged
    knn_k: list[Annotated[int, Field(ge=1)]] = Field([10, 20], min_length=1)
    compositional_draws: int = Field(32, ge=2)  # Monte Carlo draws of t and mask
    compositional_split: Literal["train", "validation", "test", "held-out", "all"] = "held-out"
    swaps: dict[str, list[list[str]]] = {}  # by rule: groups of words that may stand for one another
    max_pairs: int = Field(500, ge=1)  # of caption and foil, per rule
    caption_length: int = Field(8, ge=2)  # tokens of generated captions, the end token included
    metric_lengths: list[Annotated[int, Field(ge=2)]] = Field([4, 6, 8], min_length=1)  # tokens of scored captions
    metric_pictures: int = Field(200, ge=0)  # of the test split whose written captions are scored; 0 = none
    retrieval_pictures: int = Field(60, ge=0)  # of the test split, found among each other's captions; 0 = none
    zero_shot_templates: list[str] = Field(["{}"], min_length=1)  # in which a class is named, as "a photo of a {}"
    pictures: int = Field(12, ge=1)  # shown with captions and neighbours in the report
    seed: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        for template in self.zero_shot_templates:
            if "{}" not in template:
                raise ValueError(f"zero_shot_templates: {template!r} has no place for the class; write {{}} there")
        for rule, groups in self.swaps.items():
            for group in groups:
                words = [" ".join(word.split()).casefold() for word in group]
                if len(words) < 2 or len(set(words)) < len(words) or not all(words):
                    raise ValueError(f"swaps: rule {rule!r} needs two or more different words per group, got {group}")
        return self


class ReportParams(Section):
    """The page."""

    title: str = "Masked diffusion captioning"
    sample_pairs: int = Field(12, ge=1)
    credit: str = ""  # the source and licence of the pictures


class SlurmParams(Section):
    """What a training asks of Slurm. One GPU per rank is asked for besides, unless `compute.device` is cpu."""

    script: str = "infra/slurm/pretrain.sbatch"
    partition: str = ""  # "" = the cluster's own
    account: str = ""  # "" = the user's own
    time: str = "24:00:00"  # of one run of the job, which goes on in the next one
    cpus_per_node: int = Field(0, ge=0)  # 0 = the cluster's own
    options: list[str] = []  # more of sbatch's, as ["--qos=long", "--exclusive"]


class KubernetesParams(Section):
    """What a training asks of Kubernetes. One GPU per rank is asked for besides, unless `compute.device` is cpu."""

    manifest: str = "infra/kubernetes/pretrain.yaml"
    namespace: str = "default"
    image: str = "mdc"
    claim: str = "mdc"  # the persistent volume claim that holds this folder
    cpus: int = Field(8, ge=1)  # per pod
    memory: str = "64Gi"  # per pod


class ComputeParams(Section):
    """Where and how the work runs. Changing these does not make finished work stale."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "fp32", "tf32", "bf16"] = "auto"  # auto: bf16 on a GPU that has it, else fp32
    strategy: Literal["ddp", "fsdp"] = "ddp"  # every rank holds the whole model, or a shard of it
    activation_checkpointing: bool = False  # compute a layer's activations again rather than keep them
    compile: bool = False  # torch.compile, layer by layer
    fused_attention: bool = True  # false: plain matrix products and softmax, to compare
    fused_optimizer: bool = True  # false: AdamW tensor operation by tensor operation, to compare
    launcher: Literal["local", "hosts", "slurm", "kubernetes"] = "local"  # who starts the ranks of a training
    hosts: int = Field(1, ge=1)  # machines that train together
    endpoint: str = ""  # launcher hosts: HOST:PORT of the first host, where the others meet it
    processes: int = Field(1, ge=1)  # ranks per host, one per GPU
    restarts: int = Field(2, ge=0)  # failures in a row, without a new checkpoint between them, that are tried again
    rendezvous_timeout: float = Field(900.0, gt=0)  # seconds that hosts wait for one another, lost ones included
    slurm: SlurmParams = SlurmParams()
    kubernetes: KubernetesParams = KubernetesParams()
    workers: int = Field(1, ge=0)  # loader processes per rank
    rank_timeout: float = Field(300.0, gt=0)  # seconds that ranks wait for a silent one before all of them fail
    preflight: bool = True  # look at shards, memory, disk and tracking before the first step
    peak_tflops: float = Field(0.0, ge=0)  # of one device in the precision used, 1e12/s; 0 = looked up, or measured
    download_processes: int = Field(1, ge=1)  # with ray it is one per CPU of the cluster
    download_threads: int = Field(32, ge=1)  # per process
    distributor: Literal["multiprocessing", "ray"] = "multiprocessing"  # of downloads: this machine, or a cluster
    ray_address: str = "auto"  # of the cluster's head; auto = the one that runs on this machine
    data_workers: int = Field(1, ge=1)  # processes of the caption and shard stages
    kept_features_gb: float = Field(100.0, ge=0)  # of paths.cache, above which those not used for longest are removed

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.launcher == "local" and self.hosts > 1:
            raise ValueError(f"hosts {self.hosts} with launcher local, which is one host; set launcher: hosts")
        named = re.fullmatch(r"\S+:(\d+)", self.endpoint)
        if self.launcher == "hosts" and not (named and 0 < int(named[1]) < 2**16):
            raise ValueError(f"endpoint {self.endpoint!r} is no HOST:PORT; name the first host, as 10.0.0.1:29500")
        if self.hosts > 1 and self.rendezvous_timeout <= self.rank_timeout:
            raise ValueError(
                f"rendezvous_timeout {self.rendezvous_timeout:g} must be above rank_timeout {self.rank_timeout:g}: "
                "a host that waits for the others must outwait a rank that waits for a silent one"
            )
        return self


class TrackingParams(Section):
    """MLflow."""

    uri: str = "sqlite:///mlflow.db"  # or http://server:5000; "" = no tracking
    experiment: str = "mdc"
    run_name: str = ""  # "" = objective and preset
    parent_run: str = ""  # id of the run under which this one is shown; "" = none. `mdc sweep` sets it
    required: bool = False  # true: do not start without the server

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.required and not self.uri:
            raise ValueError("required is true, but uri is empty; name a server, or set required: false")
        return self


class Params(Section):
    """All of `params.yaml`."""

    paths: PathParams = PathParams()
    download: DownloadParams = DownloadParams()
    caption: CaptionParams = CaptionParams()
    shard: ShardParams = ShardParams()
    pretrain: PretrainParams = PretrainParams.model_validate({})
    extract: ExtractParams = ExtractParams()
    evaluate: EvaluateParams = EvaluateParams()
    report: ReportParams = ReportParams()
    compute: ComputeParams = ComputeParams()
    tracking: TrackingParams = TrackingParams()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.download.image_size < self.pretrain.image_size:
            raise ValueError(
                f"download.image_size {self.download.image_size} is below pretrain.image_size "
                f"{self.pretrain.image_size}: pictures would be enlarged; raise download.image_size"
            )
        if "://" not in self.shard.target and self.shard.target:
            self.paths.check_outside("shard.target", self.shard.target)
        ranks = self.compute.hosts * self.compute.processes * self.pretrain.accumulate
        if self.pretrain.batch_size % ranks:
            raise ValueError(
                f"pretrain.batch_size {self.pretrain.batch_size} does not divide over compute.processes "
                f"{self.compute.processes} x compute.hosts {self.compute.hosts} x pretrain.accumulate "
                f"{self.pretrain.accumulate}"
            )
        for name, length in (
            ("caption_length", self.evaluate.caption_length),
            ("metric_lengths", max(self.evaluate.metric_lengths)),
        ):
            if length > self.caption.max_tokens:
                raise ValueError(
                    f"evaluate.{name} {length} is above caption.max_tokens {self.caption.max_tokens}: "
                    "the decoder has no position for it"
                )
        return self


class Vocabulary(Section):
    """What a model must know of its tokenizer."""

    size: int
    pad_id: int
    unk_id: int
    bos_id: int
    eos_id: int
    mask_id: int

    @model_validator(mode="after")
    def _check(self) -> Self:
        ids = {name: getattr(self, name) for name in ("pad_id", "bos_id", "eos_id", "mask_id")}
        if len(set(ids.values())) < len(ids):
            raise ValueError(f"special tokens must have ids of their own, got {ids}")
        if not all(0 <= i < self.size for i in ids.values()):
            raise ValueError(f"special ids {ids} must lie within the vocabulary of {self.size}")
        return self


class ModelConfig(Section):
    """Everything that rebuilds a model: the `config.json` of a checkpoint."""

    pretrain: PretrainParams
    vocabulary: Vocabulary
    max_tokens: int = Field(ge=2)  # positions of the decoder, specials included


def _close(name: str, known: Iterable[str]) -> str:
    match = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""


def choose(kind: str, name: str, table: Mapping[str, T]) -> T:
    """`table[name]`, or an error that lists the valid names."""
    if name not in table:
        raise UserError(f"unknown {kind} {name!r}{_close(name, table)}; one of: {', '.join(sorted(table))}")
    return table[name]


def _fields_at(model: type[BaseModel], path: tuple[Any, ...]) -> list[str]:
    for part in path:
        field = model.model_fields.get(part) if isinstance(part, str) else None
        annotation = field.annotation if field else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)


def describe(error: ValidationError, place: str, model: type[BaseModel]) -> str:
    """One line per mistake: the key, its value, what is wrong and the fix."""
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            fields = _fields_at(model, item["loc"][:-1])
            close = _close(str(item["loc"][-1]), fields)
            hint = close or (f"; known here: {', '.join(fields)}" if fields else "")
            lines.append(f"{place}: unknown parameter {key}{hint}")
        elif item["type"] == "value_error":
            lines.append(f"{place}: {key + ': ' if key else ''}{item['ctx']['error']}")
        else:
            lines.append(f"{place}: {key} = {item['input']!r}: {item['msg'][0].lower()}{item['msg'][1:]}")
    return "\n".join(lines)


def checked(model: type[SectionT], place: str, **values: Any) -> SectionT:
    """Parameters that come from elsewhere than a file. Raises UserError as for a file."""
    try:
        return model(**values)
    except ValidationError as error:
        raise UserError(describe(error, place, model)) from None


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML 1.2 file."""
    try:
        tree = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{path} does not exist; run this in the project's folder, or name the file (mdc ... --params FILE)"
        ) from None
    except OSError as error:  # a folder, or no right to read
        raise UserError(f"{path} cannot be read: {error.strerror}; name a file with parameters") from None
    except (YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {error}") from None
    if tree is None:  # cut off, or the wrong file: nobody means all defaults by it
        raise UserError(f"{path} is empty; give it sections such as `pretrain:`, or {{}} where every default is meant")
    if not isinstance(tree, dict):
        raise UserError(f"{path} must hold sections such as `pretrain:`, got {type(tree).__name__}")
    return tree


def merge(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`tree` with the leaves of `changes` put over it; sections merge, lists and values are replaced."""
    merged = dict(tree)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def load_params(path: str | Path = "params.yaml", changes: Mapping[str, Any] | None = None) -> Params:
    """Read and check parameters.

    path: the YAML file. changes: sections of values to put over the file's, as `{"pretrain": {"lr": 1e-4}}`.
    Raises UserError with one line per mistake.
    """
    path = Path(path)
    try:
        return Params.model_validate(merge(read_yaml(path), changes or {}))
    except ValidationError as error:
        raise UserError(describe(error, str(path), Params)) from None


Changes = dict[str, dict[str, Any]]  # sections of values, put over those of the parameter file

SWEPT = ("pretrain", "extract", "evaluate", "compute", "tracking")  # what cells of a sweep may change
UNNAMED = "base"  # the cell of a sweep that varies nothing but the seed


class Sweep(Section):
    """The file that `mdc sweep` reads: every one of `cells`, with every combination of `grid`, for every seed."""

    base: Changes = {}  # for all cells
    variants: dict[str, Changes] = {}  # by name: over `base`, where the variant is asked for
    cells: dict[str, Changes] = {}  # by name
    grid: dict[str, Annotated[list[Any], Field(min_length=1)]] = {}  # by parameter, as `pretrain.objective`
    seeds: list[Annotated[int, Field(ge=0)]] = Field([0], min_length=1)  # values of pretrain.seed


@dataclass(frozen=True)
class SweepRun:
    """One training of a sweep, and what follows it. params: its outputs and runs lie in folders of its own."""

    cell: str
    seed: int
    params: Params


@dataclass(frozen=True)
class SweepPlan:
    """All runs of a sweep, cell by cell. outputs, work: its folders."""

    name: str
    outputs: Path
    work: Path
    runs: list[SweepRun]


def load_sweep(path: Path, params_path: Path, variant: str = "") -> SweepPlan:
    """Read and check a sweep, every one of its runs included.

    params_path: the parameter file that it starts from. variant: one of the file's variants, "" for none. Raises
    UserError with one line per mistake.
    """
    start, tree = load_params(params_path), read_yaml(params_path)
    try:
        sweep = Sweep.model_validate(read_yaml(path))
    except ValidationError as error:
        raise UserError(describe(error, str(path), Sweep)) from None
    common = merge(sweep.base, choose("variant", variant, sweep.variants)) if variant else sweep.base
    if len(set(sweep.seeds)) < len(sweep.seeds):
        raise UserError(f"{path}: seeds {sweep.seeds} holds one twice")
    name = f"{path.stem}-{variant}" if variant else path.stem
    outputs, work = (Path(folder) / "sweeps" / name for folder in (start.paths.outputs, start.paths.runs))
    runs: list[SweepRun] = []
    folders: dict[str, str] = {}
    for cell, changes in _sweep_cells(path, sweep):
        folder = re.sub(r"[^\w.=+]+", "-", cell).strip("-.")
        if not folder or folder in folders:
            raise UserError(f"{path}: cell {cell!r} and {folders.get(folder, '')!r} would share a folder; rename one")
        folders[folder] = cell
        changed = merge(common, changes)
        _check_swept(f"{path}, cell {cell}", changed)
        for seed in sweep.seeds:
            own = {
                "pretrain": {"seed": seed},
                "paths": {
                    "outputs": str(outputs / folder / f"seed-{seed}"),
                    "runs": str(work / folder / f"seed-{seed}"),
                    "cache": str(start.paths.kept),  # floors that runs have in common are made once
                },
                "tracking": {"run_name": f"{name}: {cell}, seed {seed}"},
            }
            try:
                params = Params.model_validate(merge(merge(tree, changed), own))
            except ValidationError as error:
                raise UserError(describe(error, f"{path}, cell {cell}", Params)) from None
            runs.append(SweepRun(cell, seed, params))
    return SweepPlan(name, outputs, work, runs)


def _sweep_cells(path: Path, sweep: Sweep) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Names and changes of all cells, without seeds."""
    for key in sweep.grid:
        if key.count(".") != 1:
            raise UserError(f"{path}: grid key {key!r} must name a section and a parameter, as `pretrain.objective`")
    nothing: Changes = {}
    for (name, changes), values in product(sweep.cells.items() or [("", nothing)], product(*sweep.grid.values())):
        changed: Mapping[str, Any] = changes
        names = [name] if name else []
        for key, value in zip(sweep.grid, values, strict=True):
            section, parameter = key.split(".")
            changed = merge(changed, {section: {parameter: value}})
            names.append(f"{parameter}={value}")
        yield ", ".join(names) or UNNAMED, changed


def _check_swept(place: str, changes: Mapping[str, Any]) -> None:
    for section in changes:
        if section in Params.model_fields and section not in SWEPT:
            raise UserError(
                f"{place}: {section} cannot be changed by a sweep, which runs on shards that exist; "
                f"change it in the parameter file. Sections that can: {', '.join(SWEPT)}"
            )
    if "seed" in changes.get("pretrain", {}):
        raise UserError(f"{place}: pretrain.seed is set by `seeds`; list the values there")


def partial(model: type[Section]) -> type[Section]:
    """The same class with every field optional and unset: a form for overriding single values, limits included."""
    fields: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        value: Any = field.annotation
        fields[name] = ((Annotated[(value, *field.metadata)] if field.metadata else value) | None, None)
    return create_model(f"{model.__name__}Changes", __base__=Section, **fields)


def _leaves(changes: Mapping[str, Any], at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in changes.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*at, key))
        else:
            yield (*at, key), value


def _in_one_line(value: Any) -> Any:
    """A list as YAML's `[1, 2]` rather than one line per item; anything else as it is."""
    if not isinstance(value, list):
        return value
    sequence = CommentedSeq(value)
    sequence.fa.set_flow_style()
    return sequence


def change_params(path: str | Path, changes: Mapping[str, Any]) -> list[str]:
    """Write values into the parameter file, whose comments and order stay. Nothing is written if a rule is broken.

    changes: sections of values, as `{"pretrain": {"lr": 1e-4}}`. Returns one line "pretrain.lr: 0.001 -> 0.0001"
    for each value that is new. Raises UserError with one line per mistake.
    """
    path = Path(path)
    load_params(path, changes)
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.width = 1000  # columns: no line is broken
    tree = yaml.load(path.read_text(encoding="utf-8"))
    lines = []
    for keys, value in _leaves(changes):
        section = tree
        for key in keys[:-1]:
            if not isinstance(section.get(key), dict):
                section[key] = {}
            section = section[key]
        if keys[-1] not in section or section[keys[-1]] != value:
            lines.append(f"{'.'.join(keys)}: {section.get(keys[-1])} -> {value}")
            section[keys[-1]] = _in_one_line(value)
    if lines:
        with whole_file(path) as temporary, temporary.open("w", encoding="utf-8") as file:
            yaml.dump(tree, file)
    return lines
