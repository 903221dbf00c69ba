"""How captions are written, and which are left out for what they say. N: captions."""

import html
import re
import unicodedata
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mdc.config import CaptionParams
from mdc.errors import UserError

if TYPE_CHECKING:
    from py3langid.langid import LanguageIdentifier

MISSING = "missing"
SPACES = r"[\s\p{Z}\p{Cc}]+"  # RE2's own \s is ASCII alone
UNEVEN = r"^ | $|  |[\x00-\x1f\x7f-\xa0]|[^\x00-\x7f\PZ]"  # what `SPACES` would change, one space alone excepted
PHRASES = 500  # of the blocklist in one expression


def clean(texts: pa.StringArray, params: CaptionParams) -> pa.StringArray:
    """The captions as they are to be written; null stays null. Entities are resolved once: `&amp;lt;` is `&lt;`."""
    if params.html_entities:
        texts = _changed(texts, pc.match_substring(texts, "&"), partial(_each, html.unescape))
    if params.unicode_form:
        # pyarrow's own utf8_normalize leaves some texts as they are, such as "cafe\u0301"
        composed = partial(_each, partial(unicodedata.normalize, params.unicode_form))
        texts = _changed(texts, pc.invert(pc.string_is_ascii(texts)), composed)
    if params.collapse_spaces:
        texts = _changed(texts, pc.match_substring_regex(texts, UNEVEN), _evenly_spaced)
    return texts


def _changed(texts: pa.StringArray, which: pa.BooleanArray, change: Callable[..., pa.StringArray]) -> pa.StringArray:
    """`texts` with `change` made to some of them: most captions need none."""
    which = pc.fill_null(which, False)
    return pc.replace_with_mask(texts, which, change(texts.filter(which))) if pc.any(which).as_py() else texts


def _each(change: Callable[[str], str], texts: pa.StringArray) -> pa.StringArray:
    return pa.array([change(text) for text in texts.to_pylist()], pa.string())


def _evenly_spaced(texts: pa.StringArray) -> pa.StringArray:
    return pc.utf8_trim_whitespace(pc.replace_substring_regex(texts, SPACES, " "))


def reasons(texts: pa.StringArray, params: CaptionParams) -> list[str]:
    """Why each caption is left out, "" for those that stay.

    Reasons, the first that holds: missing (null or white space), blocked, few_letters, repetitive, language.
    """
    blank = pc.equal(pc.utf8_trim_whitespace(pc.fill_null(texts, "")), "").to_numpy(zero_copy_only=False)
    found = np.where(blank, MISSING, "").astype(object)
    for reason, filtered in (
        ("blocked", _blocked(texts, params)),
        ("few_letters", _few_letters(texts, params)),
        ("repetitive", _repetitive(texts, params)),
    ):
        found[(found == "") & filtered] = reason
    if params.languages:
        left = np.flatnonzero(found == "")
        foreign = [index for index in left if _language(texts[int(index)].as_py()) not in params.languages]
        found[foreign] = "language"
    return found.tolist()


def _none(texts: pa.StringArray) -> NDArray[np.bool_]:
    return np.zeros(len(texts), bool)


def _mask(matches: Any) -> NDArray[np.bool_]:
    return pc.fill_null(matches, False).to_numpy(zero_copy_only=False)


def _blocked(texts: pa.StringArray, params: CaptionParams) -> NDArray[np.bool_]:
    """Captions with a phrase of the blocklist as words of their own, in any case."""
    found = _none(texts)
    for pattern in _blocklist(Path(params.blocklist)) if params.blocklist else ():
        found |= _mask(pc.match_substring_regex(texts, pattern))
    return found


@cache
def _blocklist(path: Path) -> tuple[str, ...]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"caption.blocklist: {path} cannot be read as UTF-8 text: {error}") from None
    phrases = sorted({" ".join(line.split()) for line in lines} - {""})
    if not phrases:
        raise UserError(f'caption.blocklist: {path} holds no word; write one per line, or set it to ""')
    quoted = [re.sub(r"([^\w\s])", r"\\\1", phrase) for phrase in phrases]
    return tuple(
        rf"(?i)(?:^|[^\p{{L}}\p{{N}}])(?:{'|'.join(quoted[start : start + PHRASES])})(?:$|[^\p{{L}}\p{{N}}])"
        for start in range(0, len(quoted), PHRASES)
    )


def _few_letters(texts: pa.StringArray, params: CaptionParams) -> NDArray[np.bool_]:
    if params.min_letters == 0:
        return _none(texts)
    letters = pc.utf8_length(pc.replace_substring_regex(texts, r"[^\p{L}\p{M}]+", ""))
    signs = pc.utf8_length(pc.replace_substring_regex(texts, SPACES, ""))
    return _mask(pc.less(letters, pc.multiply(pc.cast(signs, pa.float64()), params.min_letters)))


def _repetitive(texts: pa.StringArray, params: CaptionParams) -> NDArray[np.bool_]:
    if params.max_repetition == 1:
        return _none(texts)
    return np.array([repetition(text or "") > params.max_repetition for text in texts.to_pylist()], bool)


def repetition(text: str) -> float:
    """The share of a text's word pairs that occur earlier in it; 0 for texts of fewer than two words."""
    words = text.casefold().split()
    pairs = list(pairwise(words))
    return 1 - len(set(pairs)) / len(pairs) if pairs else 0.0


@cache
def _identifier() -> "LanguageIdentifier":
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        raise UserError("caption.languages needs a package; run `pip install 'mdc[language]'`") from None
    return LanguageIdentifier.from_model_file(MODEL_FILE)


def check(params: CaptionParams) -> None:
    """Raise UserError for a blocklist that cannot be read, and for a language that cannot be told."""
    if params.blocklist:
        _blocklist(Path(params.blocklist))
    if params.languages and (unknown := sorted(set(params.languages) - set(_identifier().labels))):
        known = ", ".join(sorted(_identifier().labels))
        raise UserError(f"caption.languages: {unknown} are not known; known are {known}")


def _language(text: str) -> str:
    """ISO 639-1 code of the likeliest language; a guess for texts of a few words."""
    return str(_identifier().classify(text)[0])
