"""Labelled pictures on disk: what probes and zero-shot classification are run on.

`imagefolder:PATH`            PATH/train/CLASS/*.jpg, and PATH/test, PATH/val or PATH/validation
`torchvision:NAME@ROOT`       a data set that torchvision keeps under ROOT; nothing is downloaded
`shards:PATH`                 the folder of the stage `shard`, where its pictures have labels
`webdataset:PATH`             PATH/train*.tar and PATH/test*.tar (or val*): a picture and a `.cls` or `.txt` label each
"""

import hashlib
import io
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

from mdc.config import choose
from mdc.data.loader import ShardDataset
from mdc.data.shards import SAMPLES
from mdc.errors import UserError
from mdc.eval.measures import UNKNOWN, Labels
from mdc.files import fingerprint, read_manifest

TEST_NAMES = ("test", "val", "validation")
PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")


@dataclass(frozen=True)
class Split:
    """N pictures with their labels.

    open: the number of a picture -> the picture. mark: a hash of what they are. groups: pictures of one group are held
    out together; empty where each stands for itself.
    """

    labels: Labels
    open: Callable[[int], Image.Image]
    keys: Sequence[str]
    mark: str
    groups: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.labels)

    def first(self, count: int | None) -> "Split":
        if count is None or count >= len(self):
            return self
        return Split(self.labels[:count], self.open, self.keys[:count], fingerprint([self.mark, count]))


@dataclass(frozen=True)
class Labelled:
    """Training and test pictures; labels are numbers of `classes`. A class of test that train lacks is `UNKNOWN`.

    mean_per_class: whether the field reports the mean over classes of this set.
    """

    name: str
    classes: list[str]
    train: Split
    test: Split
    mean_per_class: bool = False


def open_labelled(name: str) -> Labelled:
    """Open a set by one of the names above. Raises UserError where it is not there, or has one class or no pictures."""
    kind, _, where = name.partition(":")
    labelled = choose("kind of labelled data", kind, KINDS)(where)
    if len(labelled.classes) < 2 or not len(labelled.test):
        raise UserError(
            f"{name} has {len(labelled.classes)} classes to train on and {len(labelled.test)} test pictures; a probe "
            "needs two classes and some pictures to test with"
        )
    return labelled


# Folders


def _image_folder(where: str) -> Labelled:
    root = Path(where)
    test = next((root / name for name in TEST_NAMES if (root / name).is_dir()), None)
    if not (root / "train").is_dir() or test is None:
        raise UserError(f"{root} has no folders train and {' or '.join(TEST_NAMES)}, with a folder for each class")
    classes = sorted(folder.name for folder in (root / "train").iterdir() if folder.is_dir())
    train, held = (_folder_split(folder, classes) for folder in (root / "train", test))
    return Labelled(f"imagefolder:{root.name}", classes, train, held)


def _folder_split(folder: Path, classes: Sequence[str]) -> Split:
    files = sorted(file for file in folder.glob("*/**/*") if file.suffix.lower() in PICTURES)
    names = [str(file.relative_to(folder)) for file in files]
    sizes = [file.stat().st_size for file in files]
    labels = _numbers([name.split("/")[0] for name in names], classes)
    return Split(labels, partial(_open_file, files), names, fingerprint([folder.name, names, sizes]))


def _open_file(files: Sequence[Path], number: int) -> Image.Image:
    try:
        with Image.open(files[number]) as image:
            image.load()
            return image
    except (OSError, SyntaxError) as error:
        raise UserError(f"{files[number]} is not a picture that can be read: {error}") from None


def _numbers(names: Sequence[str], classes: Sequence[str]) -> Labels:
    number = {name: place for place, name in enumerate(classes)}
    return np.array([number.get(name, UNKNOWN) for name in names], dtype=np.int64)


# torchvision


@dataclass(frozen=True)
class _Torchvision:
    """train, test: the arguments that select them."""

    kind: str
    train: dict[str, Any]
    test: dict[str, Any]
    mean_per_class: bool = False


_BY_TRAIN = ({"train": True}, {"train": False})
TORCHVISION = {
    "cifar10": _Torchvision("CIFAR10", *_BY_TRAIN),
    "cifar100": _Torchvision("CIFAR100", *_BY_TRAIN),
    "fashion_mnist": _Torchvision("FashionMNIST", *_BY_TRAIN),
    "food101": _Torchvision("Food101", {"split": "train"}, {"split": "test"}),
    "imagenet": _Torchvision("ImageNet", {"split": "train"}, {"split": "val"}),
    "pets": _Torchvision("OxfordIIITPet", {"split": "trainval"}, {"split": "test"}, mean_per_class=True),
}


def _torchvision(where: str) -> Labelled:
    import torchvision

    name, _, root = where.partition("@")
    chosen = choose("torchvision data set", name, TORCHVISION)
    kind = getattr(torchvision.datasets, chosen.kind)
    try:
        train, test = (kind(root, **options) for options in (chosen.train, chosen.test))
    except (RuntimeError, OSError) as error:
        raise UserError(f"torchvision's {chosen.kind} is not under {root!r}: {error}") from None
    names = [_plain(each) for each in train.classes]
    return Labelled(name, names, _of_torchvision(train), _of_torchvision(test), chosen.mean_per_class)


def _plain(name: str | tuple[str, ...]) -> str:
    """ImageNet's classes are tuples of synonyms."""
    return (name if isinstance(name, str) else name[0]).replace("_", " ")


def _of_torchvision(dataset: Any) -> Split:
    """Labels as each kind keeps them; pictures are opened by the data set itself."""
    kept = next((getattr(dataset, name) for name in ("targets", "_labels") if hasattr(dataset, name)), None)
    assert kept is not None, f"{type(dataset).__name__} keeps its labels elsewhere"
    labels = np.asarray(kept, dtype=np.int64)
    if hasattr(dataset, "data"):  # pixels in memory
        content: Any = hashlib.sha256(np.ascontiguousarray(np.asarray(dataset.data)).tobytes()).hexdigest()
    else:
        files = next(
            getattr(dataset, name) for name in ("samples", "_image_files", "_images") if hasattr(dataset, name)
        )
        paths = [Path(file[0] if isinstance(file, tuple) else file) for file in files]
        content = [(path.name, path.stat().st_size) for path in paths]
    mark = fingerprint([type(dataset).__name__, hashlib.sha256(labels.tobytes()).hexdigest(), content])
    return Split(labels, lambda number: dataset[number][0], [str(i) for i in range(len(labels))], mark)


# WebDataset


@dataclass(frozen=True)
class _Member:
    """A sample of a tar: where its picture lies, and its label."""

    key: str
    tar: Path
    offset: int
    size: int
    label: str


def _webdataset(where: str) -> Labelled:
    root = Path(where)
    train = sorted(root.glob("train*.tar"))
    test = next((found for name in TEST_NAMES if (found := sorted(root.glob(f"{name}*.tar")))), [])
    if not train or not test:
        raise UserError(f"{root} has no train*.tar and {' or '.join(f'{name}*.tar' for name in TEST_NAMES)}")
    members = [[member for tar in tars for member in _members(tar)] for tars in (train, test)]
    names = {member.label for member in members[0]}
    classes = sorted(names, key=lambda name: (int(name) if name.isdigit() else -1, name))
    train_split, test_split = (_tar_split(each, classes) for each in members)
    return Labelled(f"webdataset:{root.name}", classes, train_split, test_split)


def _tar_split(members: Sequence[_Member], classes: Sequence[str]) -> Split:
    labels = _numbers([member.label for member in members], classes)
    mark = fingerprint([(member.key, member.size, member.label) for member in members])
    return Split(labels, partial(_open_member, members), [member.key for member in members], mark)


def _members(tar: Path) -> Iterator[_Member]:
    """Samples in their order. Raises UserError for one that lacks a picture or a label."""
    pictures: dict[str, tuple[int, int]] = {}
    labels: dict[str, str] = {}
    with tarfile.open(tar) as file:
        for member in file:
            folder, _, name = member.name.rpartition("/")
            stem, _, extension = name.partition(".")
            key = f"{folder}/{stem}" if folder else stem
            if f".{extension.lower()}" in PICTURES:
                pictures[key] = member.offset_data, member.size
            elif extension in ("cls", "txt") and (content := file.extractfile(member)) is not None:
                labels.setdefault(key, content.read().decode().strip())
    if lacking := pictures.keys() ^ labels.keys():
        raise UserError(f"{tar}: sample {min(lacking)!r} lacks a picture or a label (.cls or .txt)")
    for key, (offset, size) in pictures.items():
        yield _Member(key, tar, offset, size, labels[key])


def _open_member(members: Sequence[_Member], number: int) -> Image.Image:
    member = members[number]
    with member.tar.open("rb") as file:
        file.seek(member.offset)
        try:
            return Image.open(io.BytesIO(file.read(member.size)))
        except OSError as error:
            raise UserError(f"{member.tar}: {member.key} is not a picture that can be read: {error}") from None


# The stage `shard`


def _shards(where: str) -> Labelled:
    root = Path(where)
    read_manifest(root, made_by="shard")
    table = pd.read_parquet(root / SAMPLES, columns=["uid", "split", "label", "group"]).fillna("")
    table = table[table["label"] != ""].set_index("uid")
    classes = sorted(set(table["label"][table["split"] == "train"]))
    train, test = (_shard_split(ShardDataset(root, split), table, classes) for split in ("train", "test"))
    return Labelled(f"shards:{root}", classes, train, test)


def _shard_split(dataset: ShardDataset, table: pd.DataFrame, classes: Sequence[str]) -> Split:
    """The pictures that have a label. table: label and group by uid."""
    rows = [row for row, uid in enumerate(dataset.uids) if uid in table.index]
    keys = [dataset.uids[row] for row in rows]
    found = table.loc[keys]

    def open_row(number: int) -> Image.Image:
        return Image.fromarray(dataset.images([rows[number]])[0].permute(1, 2, 0).numpy())

    mark = fingerprint([dataset.version, dataset.split, keys])
    return Split(_numbers(found["label"].tolist(), classes), open_row, keys, mark, found["group"].tolist())


KINDS: dict[str, Callable[[str], Labelled]] = {
    "imagefolder": _image_folder,
    "shards": _shards,
    "torchvision": _torchvision,
    "webdataset": _webdataset,
}
