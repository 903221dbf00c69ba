"""Labelled pictures in every layout that is read, and features of them kept on disk."""

import gzip
import io
import json
import multiprocessing
import os
import socket
import struct
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from mdc import dist
from mdc.errors import UserError
from mdc.eval import frozen
from mdc.eval.frozen import frozen_features, pixels
from mdc.eval.labelled import Labelled, Split, open_labelled
from mdc.eval.measures import UNKNOWN

COLOURS = {"blue": (30, 60, 220), "green": (30, 200, 40), "red": (220, 30, 30)}


def picture(colour: str, number: int) -> Image.Image:
    noise = np.random.default_rng(number).integers(-25, 25, (10, 12, 3))
    return Image.fromarray((np.array(COLOURS[colour]) + noise).clip(0, 255).astype(np.uint8))


def image_folder(root: Path) -> str:
    for split, count in (("train", 6), ("val", 3)):
        for colour in COLOURS:
            folder = root / split / colour
            folder.mkdir(parents=True)
            for number in range(count):
                picture(colour, number).save(folder / f"{number}.png")
    return f"imagefolder:{root}"


def webdataset(root: Path) -> str:
    root.mkdir()
    for split, count in (("train-000", 6), ("train-001", 3), ("test", 3)):
        with tarfile.open(root / f"{split}.tar", "w") as tar:
            for label, colour in enumerate(COLOURS):
                for number in range(count):
                    data = io.BytesIO()
                    picture(colour, number).save(data, "png")
                    files = {"png": data.getvalue(), "cls": f"{label}\n".encode()}
                    for extension, content in files.items():
                        name = f"{split}{colour}{number}.{extension}"
                        member = tarfile.TarInfo(name)
                        member.size = len(content)
                        tar.addfile(member, io.BytesIO(content))
    return f"webdataset:{root}"


def fashion_mnist(root: Path) -> str:
    """The files of torchvision's FashionMNIST, of 20 and 10 pictures."""
    raw = root / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for split, count in (("train", 20), ("t10k", 10)):
        images = np.random.default_rng(count).integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        files = (("images-idx3", 2051, (count, 28, 28), images), ("labels-idx1", 2049, (count,), labels))
        for name, magic, sizes, data in files:
            content = struct.pack(f">{1 + len(sizes)}I", magic, *sizes) + data.tobytes()
            (raw / f"{split}-{name}-ubyte").write_bytes(content)
            (raw / f"{split}-{name}-ubyte.gz").write_bytes(gzip.compress(content))
    return f"torchvision:fashion_mnist@{root}"


def food101(root: Path) -> str:
    base = root / "food-101"
    (base / "meta").mkdir(parents=True)
    for split, count in (("train", 4), ("test", 2)):
        names = {colour: [f"{colour}/{split}{number}" for number in range(count)] for colour in COLOURS}
        (base / "meta" / f"{split}.json").write_text(json.dumps(names))
        for colour, files in names.items():
            for number, name in enumerate(files):
                path = base / "images" / f"{name}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                picture(colour, number).save(path)
    return f"torchvision:food101@{root}"


def pets(root: Path) -> str:
    base = root / "oxford-iiit-pet"
    (base / "annotations" / "trimaps").mkdir(parents=True)
    (base / "images").mkdir()
    for split, count in (("trainval", 4), ("test", 2)):
        lines = [f"{colour}_{split}{n} {c + 1} 1 1" for c, colour in enumerate(COLOURS) for n in range(count)]
        (base / "annotations" / f"{split}.txt").write_text("\n".join(lines))
        for line in lines:
            name = line.split()[0]
            picture(name.split("_")[0], len(name)).save(base / "images" / f"{name}.jpg")
    return f"torchvision:pets@{root}"


MADE: dict[str, tuple[Callable[[Path], str], int, int, int]] = {
    "imagefolder": (image_folder, 3, 18, 9),
    "webdataset": (webdataset, 3, 27, 9),
    "fashion_mnist": (fashion_mnist, 10, 20, 10),
    "food101": (food101, 3, 12, 6),
    "pets": (pets, 3, 12, 6),
}


@pytest.mark.parametrize("kind", MADE)
def test_every_layout_is_read(tmp_path: Path, kind: str) -> None:
    make, classes, train, test = MADE[kind]
    data = open_labelled(make(tmp_path / "data"))
    assert (len(data.classes), len(data.train), len(data.test)) == (classes, train, test)
    assert data.mean_per_class == (kind == "pets")
    for split in (data.train, data.test):
        assert split.open(len(split) - 1).size in ((12, 10), (28, 28))
        assert np.unique(split.labels).tolist() == list(range(classes))
    if kind != "fashion_mnist":
        for number in range(len(data.train)):
            mean = np.asarray(data.train.open(number).convert("RGB")).mean((0, 1))
            assert mean.argmax() == [2, 1, 0][data.train.labels[number]]
    assert open_labelled(make(tmp_path / "again")).train.mark == data.train.mark != data.test.mark


def test_labelled_shards_are_read_with_their_groups(shards: Path, unlabelled: Path) -> None:
    data = open_labelled(f"shards:{shards}")
    assert (data.classes, len(data.train), len(data.test)) == (["blue", "green", "red"], 42, 18)
    assert len(set(data.train.groups)) == 7
    for number in range(len(data.test)):
        assert np.asarray(data.test.open(number)).mean((0, 1)).argmax() == [2, 1, 0][data.test.labels[number]]
    with pytest.raises(UserError, match="has 0 classes"):
        open_labelled(f"shards:{unlabelled}")


def test_a_class_only_in_test_is_unknown(tmp_path: Path) -> None:
    name = image_folder(tmp_path)
    (tmp_path / "val" / "red").rename(tmp_path / "val" / "violet")
    data = open_labelled(name)
    assert data.classes == ["blue", "green", "red"]
    assert data.test.labels.tolist() == [0] * 3 + [1] * 3 + [UNKNOWN] * 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("imagefolders:x", "did you mean 'imagefolder'"),
        ("imagefolder:{}", "has no folders train and test or val"),
        ("torchvision:cifar11@{}", "did you mean 'cifar10"),
        ("torchvision:cifar10@{}", "CIFAR10 is not under"),
        ("webdataset:{}", r"has no train\*\.tar"),
    ],
)
def test_what_is_not_there_is_told(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_labelled(name.format(tmp_path))


def test_a_sample_without_a_label_is_named(tmp_path: Path) -> None:
    name = webdataset(tmp_path / "shards")
    with tarfile.open(tmp_path / "shards" / "test.tar", "a") as tar:
        tar.addfile(tarfile.TarInfo("lonely.png"), io.BytesIO())
    with pytest.raises(UserError, match="'lonely' lacks a picture or a label"):
        open_labelled(name)


class Counting:
    """Mean colours as features; counts the pictures that it encoded."""

    def __init__(self, factor: float = 1.0) -> None:
        self.count, self.factor = 0, factor

    def __call__(self, pictures: Sequence[Image.Image]) -> Tensor:
        self.count += len(pictures)
        means = [np.asarray(each.convert("RGB")).mean((0, 1)) for each in pictures]
        return torch.from_numpy(np.stack(means)).float() * self.factor


@pytest.fixture
def data(tmp_path: Path) -> Labelled:
    return open_labelled(image_folder(tmp_path / "data"))


def test_features_are_made_once_for_equal_weights_and_pictures(data: Labelled, tmp_path: Path) -> None:
    encode = Counting()
    first = frozen_features(encode, "a", data.train, tmp_path / "cache")
    assert (first.dtype, first.shape, encode.count) == (np.float16, (18, 3), 18)
    again = frozen_features(encode, "a", data.train, tmp_path / "cache")
    assert encode.count == 18
    assert isinstance(again, np.memmap)
    np.testing.assert_array_equal(first, again)
    frozen_features(encode, "b", data.train, tmp_path / "cache")
    frozen_features(encode, "a", data.test, tmp_path / "cache")
    assert encode.count == 18 + 18 + 9


def test_damaged_features_are_made_again(data: Labelled, tmp_path: Path) -> None:
    encode = Counting()
    first = np.array(frozen_features(encode, "a", data.test, tmp_path / "cache"))
    (file,) = (tmp_path / "cache").glob("*/rows.npy")
    file.chmod(0o644)
    file.write_bytes(file.read_bytes()[:-2] + b"\0\0")
    np.testing.assert_array_equal(frozen_features(encode, "a", data.test, tmp_path / "cache"), first)
    assert encode.count == 18


def test_features_that_are_not_finite_are_refused_with_their_keys(data: Labelled, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"9 pictures are not finite .*: blue/0\.png, blue/1\.png"):
        frozen_features(Counting(1e6), "a", data.test, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*/"))


def test_pixels_are_the_picture(data: Labelled) -> None:
    row = pixels(4)([data.train.open(0)])[0].view(3, 4, 4)
    expected = (np.array(COLOURS["blue"]) / 127.5 - 1)[:, None]
    np.testing.assert_allclose(row.flatten(1), np.broadcast_to(expected, (3, 16)), atol=0.25)


def test_a_part_has_a_mark_of_its_own(data: Labelled) -> None:
    part: Split = data.test.first(4)
    assert len(part) == 4
    assert part.mark != data.test.mark
    assert data.test.first(None) is data.test


def one_rank(rank: int, port: int, name: str, cache: Path, results: Path, factor: float) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    encode = Counting(factor)
    with dist.process_group(torch.device("cpu"), timeout_s=60):
        try:
            made = frozen_features(encode, "a", open_labelled(name).train, cache)
            np.savez(results / f"{rank}.npz", features=made, encoded=encode.count)
        except UserError as error:
            (results / f"{rank}.txt").write_text(str(error))


@pytest.mark.parametrize("factor", [1.0, 1e6])
def test_ranks_share_the_work_and_see_the_whole(tmp_path: Path, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """19 pictures over two ranks: each is encoded once, and lies in its row; bad ones are told on both."""
    monkeypatch.setattr(frozen, "AT_ONCE", 5)  # blocks of 5, 5, 5 and 4
    name = image_folder(tmp_path / "data")
    picture("red", 99).save(tmp_path / "data" / "train" / "red" / "99.png")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    arguments = (port, name, tmp_path / "cache", tmp_path, factor)
    ranks = [fork.Process(target=one_rank, args=(rank, *arguments)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    if factor > 1:
        messages = [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)]
        assert messages[0] == messages[1]
        assert "5 pictures are not finite" in messages[0]
        return
    alone = frozen_features(Counting(), "a", open_labelled(name).train, tmp_path / "alone")
    found = [np.load(tmp_path / f"{rank}.npz") for rank in range(2)]
    assert [int(each["encoded"]) for each in found] == [10, 9]
    for each in found:
        np.testing.assert_array_equal(each["features"], alone)
