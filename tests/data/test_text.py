"""How captions are written, and what is left out for what it says."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from mdc.config import CaptionParams
from mdc.data import text
from mdc.data.text import repetition
from mdc.errors import UserError


def cleaned(texts: list[str | None], **params: object) -> list[str | None]:
    result: list[str | None] = text.clean(
        pa.array(texts, pa.string()), CaptionParams.model_validate(params)
    ).to_pylist()
    return result


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("a dog", "a dog"),
        (" a  dog\u00a0\u3000on\ta mat\n", "a dog on a mat"),
        ("a\u0000dog\u0085", "a dog"),
        ("cafe\u0301", "caf\u00e9"),
        ("salt &amp; pepper &lt;3", "salt & pepper <3"),
        ("&amp;lt;", "&lt;"),  # once
        ("\ufb01sh", "\ufb01sh"),
        (None, None),
        ("", ""),
    ],
)
def test_captions_are_written_one_way(given: str | None, written: str | None) -> None:
    assert cleaned([given, "a cat"]) == [written, "a cat"]


def test_each_way_can_be_turned_off() -> None:
    assert cleaned(["a &amp;  e\u0301"], html_entities=False) == ["a &amp; \u00e9"]
    assert cleaned(["a &amp;  e\u0301"], collapse_spaces=False) == ["a &  \u00e9"]
    assert cleaned(["a &amp;  e\u0301"], unicode_form="") == ["a & e\u0301"]
    assert cleaned(["\ufb01sh"], unicode_form="NFKC") == ["fish"]


def reasons(texts: list[str | None], **params: object) -> list[str]:
    return text.reasons(pa.array(texts, pa.string()), CaptionParams.model_validate(params))


def test_nothing_but_missing_text_is_left_out_by_default() -> None:
    assert reasons(["NA", "null", "123 !!", None, "", " \u3000", "a a a a"]) == [""] * 3 + ["missing"] * 3 + [""]


def test_few_letters() -> None:
    texts: list[str | None] = ["a dog", "IMG_1234.jpg", "$$$ 100", "dog 12 345", "犬がいる"]
    assert reasons(texts, min_letters=0.5) == ["", "", "few_letters", "few_letters", ""]


def test_repetition() -> None:
    assert repetition("a dog on a mat") == 0
    assert repetition("dog") == repetition("") == 0
    assert repetition("buy now buy now buy now") == pytest.approx(3 / 5)
    assert repetition("Dog DOG dog") == pytest.approx(1 / 2)
    assert reasons(["buy now buy now buy now", "a dog on a mat"], max_repetition=0.5) == ["repetitive", ""]


def test_blocked_words(tmp_path: Path) -> None:
    words = tmp_path / "words.txt"
    words.write_text("nude\n\n c++ \nclick   here\nÉtat\n")
    texts: list[str | None] = [
        "a NUDE dog",
        "denuded hills",
        "I like C++.",
        "Click here!",
        "clicks here",
        "un état",
        "a",
    ]
    blocked = ["blocked", "", "blocked", "blocked", "", "blocked", ""]
    assert reasons(texts, blocklist=str(words)) == blocked


@pytest.mark.parametrize(("content", "message"), [(b"\n \n", "holds no word"), (b"\xff", "cannot be read as UTF-8")])
def test_a_useless_blocklist_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "words.txt").write_bytes(content)
    with pytest.raises(UserError, match=rf"caption\.blocklist: .*words\.txt {message}"):
        text.check(CaptionParams(blocklist=str(tmp_path / "words.txt")))
    with pytest.raises(UserError, match="cannot be read"):
        text.check(CaptionParams(blocklist=str(tmp_path / "none.txt")))


def test_languages() -> None:
    texts: list[str | None] = ["a small dog sleeps on the mat", "ein kleiner Hund schläft auf der Matte", None]
    assert reasons(texts, languages=["en"]) == ["", "language", "missing"]
    assert reasons(texts, languages=["de", "en"]) == ["", "", "missing"]
    with pytest.raises(UserError, match=r"caption\.languages: \['english'\] are not known; known are .*\ben\b"):
        text.check(CaptionParams(languages=["english"]))


def test_the_filters_are_counted(tmp_path: Path, downloaded: Callable[..., Path]) -> None:
    from mdc.data.captions import prepare_captions
    from mdc.files import read_json

    captions: list[str | None] = [f"a red dog {i}" for i in range(60)] + ["$$$ !!! 1", "go go go go", None]
    params = CaptionParams(
        vocab_size=100, validation_share=0.2, test_share=0.2, min_letters=0.5, max_repetition=0.5, max_tokens=30
    )
    prepare_captions(params, downloaded(captions=captions), tmp_path / "captions")
    counts = read_json(tmp_path / "captions" / "manifest.json")["counts"]
    assert counts["reasons"] == counts["captions"] == {"few_letters": 1, "kept": 60, "missing": 1, "repetitive": 1}
