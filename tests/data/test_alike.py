"""Pictures that are the same, or nearly: placeholders go, evaluation pictures go, the others share a split."""

from collections import Counter
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from sklearn.datasets import load_sample_images

from mdc.config import CaptionParams
from mdc.data import alike
from mdc.data.alike import WORDS, decide, perceptual_hash
from mdc.errors import UserError
from mdc.files import read_json

Row = dict[str, Any]


def row(number: int, sha256: str, bits: int | None = None, group: str = "", usable: bool = True) -> Row:
    words = [None] * 4 if bits is None else [bits >> 64 * at & 2**64 - 1 for at in range(4)]
    return {
        "part": f"{number % 3:05d}",
        "uid": f"u{number:03d}",
        "url": f"http://a.test/{number}",
        "group": group,
        "sha256": sha256,
        **dict(zip(WORDS, words, strict=True)),
        "usable": usable,
    }


def decided(tmp_path: Path, rows: list[Row], **params: Any) -> pd.DataFrame:
    listed = tmp_path / "listed"
    listed.mkdir()
    schema = pa.schema([(name, pa.string()) for name in ("part", "uid", "url", "group", "sha256")])
    for name in WORDS:
        schema = schema.append(pa.field(name, pa.uint64()))
    schema = schema.append(pa.field("usable", pa.bool_()))
    for part in sorted({row["part"] for row in rows}):
        some = [row for row in rows if row["part"] == part]
        pq.write_table(pa.Table.from_pylist(some, schema), listed / f"{part}.parquet")
    decide(CaptionParams.model_validate(params), listed, tmp_path / "scratch", tmp_path / "decisions")
    tables = [pd.read_parquet(file) for file in sorted((tmp_path / "decisions").glob("*.parquet"))]
    assert all(table["uid"].is_monotonic_increasing for table in tables)
    return pd.concat(tables).set_index("uid").sort_index()


def test_a_picture_with_too_many_rows_stands_for_missing_ones(tmp_path: Path) -> None:
    rows = [row(n, "placeholder") for n in range(8)] + [row(8 + n, "five captions") for n in range(5)]
    found = decided(tmp_path, rows, max_repeats=7)
    assert found["reason"].tolist() == ["repeated_picture"] * 8 + [""] * 5
    told = read_json(tmp_path / "decisions" / "duplicates.json")
    assert (told["pictures"], told["rows"], told["repeated_pictures"], told["repeated_rows"]) == (2, 13, 2, 13)
    assert told["top"][0] == {"rows": 8, "sha256": "placeholder", "uid": "u000", "url": "http://a.test/0"}


def near_pairs(hashes: list[int], bits: int) -> set[tuple[int, int]]:
    return {(a, b) for a, b in combinations(range(len(hashes)), 2) if (hashes[a] ^ hashes[b]).bit_count() <= bits}


@pytest.mark.parametrize("bits", [0, 3, 7, 12, 15])
def test_all_pairs_within_the_distance_are_found_and_no_others(tmp_path: Path, bits: int) -> None:
    random = np.random.default_rng(bits)
    hashes = [int.from_bytes(random.bytes(32)) for _ in range(40)]
    for first in range(20):  # neighbours at every distance around the limit
        flipped = random.choice(256, size=first, replace=False)
        hashes.append(hashes[first] ^ sum(1 << int(bit) for bit in flipped))
    found = decided(tmp_path, [row(n, f"{n:03d}", value) for n, value in enumerate(hashes)], alike_bits=bits)
    groups = {frozenset(names.index) for _, names in found.groupby("group") if len(names) > 1}
    assert groups == {frozenset((f"u{a:03d}", f"u{b:03d}")) for a, b in near_pairs(hashes, bits)}
    assert len(groups) == bits + 1
    assert (found["reason"] == "").all()


def test_groups_pictures_and_likeness_join_through_each_other(tmp_path: Path) -> None:
    near, far = 0b1011, (1 << 256) - 1
    rows = [
        row(0, "a", 0, group="z"),
        row(1, "b", near, group="m"),  # nearly a
        row(2, "c", far, group="m"),
        row(3, "c", far),  # the same as c
        row(4, "d", None, group="m"),
        row(5, "e", 0b1 << 100 | far >> 128),
        row(6, ""),  # two rows without a picture share nothing
        row(7, ""),
    ]
    found = decided(tmp_path, rows, alike_bits=3)
    assert found.loc[["u000", "u001", "u002", "u003", "u004"], "group"].nunique() == 1
    assert found["group"].nunique() == 4
    assert found["group"]["u000"] == "content c"
    assert read_json(tmp_path / "decisions" / "duplicates.json")["alike_sets"] == 1


def test_only_the_first_of_alike_pictures_stays_where_asked(tmp_path: Path) -> None:
    rows = [row(0, "a", 0, usable=False), row(1, "b", 1), row(2, "c", 3), row(3, "c", 3), row(4, "d", 2**200 - 1)]
    found = decided(tmp_path, rows, alike_bits=2, alike="drop")
    assert found["reason"].tolist() == ["duplicate_picture", "", "duplicate_picture", "duplicate_picture", ""]


def texture(number: int, size: int = 120) -> Image.Image:
    pixels = np.random.default_rng(number).integers(0, 256, (10, 10, 3), np.uint8)
    return Image.fromarray(pixels).resize((size, size), Image.Resampling.BICUBIC)


def test_recompressed_and_shrunken_pictures_are_alike_and_others_are_not(tmp_path: Path) -> None:
    def saved(image: Image.Image, quality: int, size: int) -> Image.Image:
        image.resize((size, size), Image.Resampling.LANCZOS).save(tmp_path / "a.jpg", quality=quality)
        with Image.open(tmp_path / "a.jpg") as read:
            return read.copy()

    def bits(image: Image.Image) -> int:
        """Of the picture at the size and quality at which all are stored."""
        return sum(word << 64 * at for at, word in enumerate(perceptual_hash(saved(image, 95, 128))))

    photographs = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    parts = [photo.crop((x, y, x + 200, y + 200)) for photo in photographs for x in (0, 150, 300) for y in (0, 200)]
    whole = [bits(part) for part in parts]
    for part, hashed in zip(parts, whole, strict=True):
        assert (hashed ^ bits(saved(part, 75, 100))).bit_count() <= CaptionParams().alike_bits
    assert min((a ^ b).bit_count() for a, b in combinations(whole, 2)) > 60


def test_evaluation_pictures_are_left_out(tmp_path: Path, downloaded: Callable[..., Path], monkeypatch: Any) -> None:
    from mdc.data.captions import prepare_captions

    folder = downloaded()
    tar = folder / "00000.tar"
    stored = {m.name: tar.read_bytes()[m.offset : m.offset + m.size] for m in alike.members(tar)}
    evaluation = tmp_path / "evaluation" / "test"
    evaluation.mkdir(parents=True)
    (evaluation / "a.jpg").write_bytes(stored["u003.jpg"])  # its perceptual hash
    (evaluation / "b.png").write_bytes(b"")
    params = CaptionParams(vocab_size=100, validation_share=0.2, test_share=0.2, exclude=str(tmp_path / "evaluation"))
    with pytest.raises(UserError, match=r"caption\.exclude: .*b\.png cannot be read \(decode: 0 bytes\)"):
        prepare_captions(params, folder, tmp_path / "captions")
    (evaluation / "b.png").unlink()
    prepare_captions(params, folder, tmp_path / "captions")
    rows = pd.concat(map(pd.read_parquet, (tmp_path / "captions").glob("*.parquet"))).set_index("uid")
    assert Counter(rows["reason"]) == {"": 44, "evaluation_picture": 1}
    assert rows.loc["u003", "reason"] == "evaluation_picture"


def test_a_list_of_evaluation_pictures(tmp_path: Path) -> None:
    texture(0).save(tmp_path / "a.png")
    (tmp_path / "list.txt").write_text("a.png\n\n")
    assert alike.evaluation_files(tmp_path / "list.txt") == [tmp_path / "a.png"] == alike.evaluation_files(tmp_path)
    (tmp_path / "list.txt").write_text("b.png\n")
    with pytest.raises(UserError, match=r"names .*b\.png, which is not there"):
        alike.evaluation_files(tmp_path / "list.txt")
    with pytest.raises(UserError, match="neither a folder nor a file"):
        alike.evaluation_files(tmp_path / "none")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9.png\n")
    with pytest.raises(UserError, match=r"latin\.txt cannot be read as UTF-8 text"):
        alike.evaluation_files(tmp_path / "latin.txt")
