"""The sample's list; drawing all of it takes seconds, so a few drawings stand for all."""

import io
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image

from mdc.data import sample


@pytest.fixture(scope="module")
def drawings() -> dict[str, sample.Drawing]:
    return {drawing.uid: drawing for drawing in sample.list_drawings()}


def test_counts(drawings: dict[str, sample.Drawing]) -> None:
    assert len(drawings) == 3953
    assert sum(not drawing.category for drawing in drawings.values()) == 180  # 175 unknown ones, 5 swatches
    assert len({drawing.category for drawing in drawings.values()} - {""}) == 9
    assert len({drawing.caption for drawing in drawings.values()}) == 3953


def test_skin_tones_of_one_emoji_share_its_base(drawings: dict[str, sample.Drawing]) -> None:
    woman = drawings["1F469-1F3FF"]
    assert (woman.caption, woman.category, woman.base) == ("woman dark skin tone", "People & Body", "1F469")
    bases = {drawing.caption: drawing.base for drawing in drawings.values()}
    toned = [caption for caption in bases if sample.SKIN_TONE_WORDS.search(caption)]
    assert len(toned) > 1500
    for caption in toned:
        bare = sample.SKIN_TONE_WORDS.sub("", caption)
        assert bases.get(bare, bases[caption]) == bases[caption], caption


def test_build_is_the_same_each_time_and_mends_itself(
    tmp_path: Path, drawings: dict[str, sample.Drawing], monkeypatch: pytest.MonkeyPatch, files_of: Callable
) -> None:
    some = [drawings[uid] for uid in ("1F469-1F3FF", "1F34E", "1FADC")]
    monkeypatch.setattr(sample, "list_drawings", lambda: some)
    folder = tmp_path / "sample"
    assert sample.build_sample(folder) == 3
    first = files_of(folder)
    written = (folder / "urls.parquet").stat().st_mtime_ns
    assert sample.build_sample(folder) == 3
    assert (folder / "urls.parquet").stat().st_mtime_ns == written
    (folder / "images" / "1F34E.png").write_bytes(b"")
    assert sample.build_sample(folder) == 3
    assert files_of(folder) == first
    rows = pd.read_parquet(folder / "urls.parquet")
    assert list(rows.columns) == ["uid", "url", "caption", "category", "base", "sha256"]
    assert list(rows["category"]) == ["People & Body", "Food & Drink", ""]
    assert rows["url"][1] == "sample:///images/1F34E.png"
    apple = Image.open(io.BytesIO(first["images/1F34E.png"]))
    assert apple.size == (72, 72)
    assert apple.mode == "RGBA"
    assert apple.getpixel((0, 0))[3] == 0
    assert apple.getpixel((36, 36))[3] == 255
    assert "CC BY-SA 4.0" in first["CREDITS.txt"].decode()
