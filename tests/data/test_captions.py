"""Captions: what is dropped and why, the filter by tokens, and a split that no group and no picture straddles."""

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest

from mdc.config import CaptionParams
from mdc.data.alike import components
from mdc.data.captions import fit_length, prepare_captions, split_of
from mdc.data.tokenizer import CaptionTokenizer
from mdc.errors import UserError
from mdc.files import read_json

PARAMS = CaptionParams(vocab_size=100, validation_share=0.2, test_share=0.2)


def prepared(folder: Path, output: Path, params: CaptionParams = PARAMS) -> tuple[pd.DataFrame, dict]:
    prepare_captions(params, folder, output)
    rows = pd.concat([pd.read_parquet(file) for file in sorted(output.glob("*.parquet"))]).set_index("uid")
    return rows, read_json(output / "manifest.json")["counts"]


def test_every_captioned_row_is_kept_or_has_a_reason(tmp_path: Path, downloaded: Callable[..., Path]) -> None:
    words = [f"a red dog {i % 7}" for i in range(60)]
    odd: list[str | None] = [
        "NA",
        "null",
        "None",
        "nan",
        None,
        "",
        "  ",
        "N/A",
        " ".join(["dog"] * 50),
        "a [MASK] dog [PAD]",
    ]
    captions = words + odd
    status = ["ok"] * len(captions)
    status[0], status[1], status[64] = "failed:http_404", "dropped:duplicate", "dropped:missing_caption"
    folder = downloaded(captions=captions, status=status)
    rows, counts = prepared(folder, tmp_path / "captions")
    assert len(rows) == len(captions) - 2  # those without a picture have no caption to prepare
    assert counts["rows"] == len(rows)
    reasons = rows["reason"].value_counts().to_dict()
    assert reasons == {"": len(rows) - 4, "missing": 3, "too_long": 1}
    assert counts["reasons"] == {"kept": len(rows) - 4, "missing": 3, "too_long": 1}
    assert counts["kept"] == sum(counts["splits"].values()) == (rows["reason"] == "").sum()
    assert counts["escaped"] == 1
    assert (rows["kept"] == (rows["reason"] == "")).all()
    assert rows.loc["u060", "caption"] == "NA"
    vocabulary = CaptionTokenizer.load(tmp_path / "captions").vocabulary
    for tokens in rows.loc[rows["kept"], "tokens"]:
        assert tokens[-1] == vocabulary.eos_id
        assert not {vocabulary.mask_id, vocabulary.pad_id, vocabulary.bos_id} & set(tokens)
        assert PARAMS.min_tokens <= len(tokens) <= PARAMS.max_tokens


def test_lengths_count_the_end_token() -> None:
    params = CaptionParams(min_tokens=3, max_tokens=5)
    cut = params.model_copy(update={"too_long": "truncate"})
    end = 9
    assert fit_length([1, end], params) == ([1, end], "too_short")
    for length in (3, 4, 5):
        tokens = [*range(length - 1), end]
        assert fit_length(tokens, params) == fit_length(tokens, cut) == (tokens, "")
    assert fit_length([0, 1, 2, 3, 4, end], params)[1] == "too_long"
    assert fit_length([0, 1, 2, 3, 4, end], cut) == ([0, 1, 2, 3, end], "")


def test_very_long_captions(tmp_path: Path, downloaded: Callable[..., Path]) -> None:
    captions: list[str | None] = [f"a red dog {i}" for i in range(60)]
    captions += [" ".join(["dog"] * 10_000), "x" * 5_000]
    params = PARAMS.model_copy(update={"too_long": "truncate"})
    rows, counts = prepared(downloaded(captions=captions), tmp_path / "captions", params)
    assert len(rows.loc["u060", "tokens"]) == params.max_tokens
    assert rows["kept"].all()
    assert counts["truncated"] == 1


def test_no_group_and_no_picture_is_in_two_splits(tmp_path: Path, downloaded: Callable[..., Path]) -> None:
    count = 300
    groups = [f"g{i // 3}" for i in range(count)]
    groups[-30:] = [""] * 30
    pictures = [f"picture {i}" for i in range(count)]
    pictures[3], pictures[100] = pictures[0], pictures[0]  # ties g0, g1 and g33 together
    pictures[-10:] = ["placeholder"] * 10
    captions: list[str | None] = [f"a dog {i}" for i in range(count)]
    folder = downloaded(captions=captions, group=groups, sha256=pictures)
    rows, counts = prepared(folder, tmp_path / "captions", PARAMS.model_copy(update={"max_repeats": 10}))
    rows["picture"], rows["given"] = pictures, groups
    assert set(rows["split"]) == {"train", "validation", "test"}
    assert (rows.groupby("picture")["split"].nunique() == 1).all()
    assert (rows[rows["given"] != ""].groupby("given")["split"].nunique() == 1).all()
    assert counts["groups"] == 90 - 2 + 20 + 1


def test_sets_are_named_by_the_smallest() -> None:
    links = pa.table({"a": ["b", "x", "c"], "b": ["a", "y", "b"]})
    assert dict(zip(*components(links).to_pydict().values(), strict=True)) == {
        **dict.fromkeys("abc", "a"),
        **dict.fromkeys("xy", "x"),
    }
    assert not len(components(links.slice(0, 0)))


def test_the_split_follows_the_shares_and_the_name_alone() -> None:
    splits = pd.Series([split_of(f"group {i}", 0.1, 0.2) for i in range(5000)])
    shares = splits.value_counts(normalize=True)
    assert abs(shares["validation"] - 0.1) < 0.015
    assert abs(shares["test"] - 0.2) < 0.02
    assert split_of("group 7", 0.1, 0.2) == splits[7]
    assert {split_of(f"group {i}", 0.0, 0.0) for i in range(100)} == {"train"}


def test_the_tokenizer_knows_training_captions_only(tmp_path: Path, downloaded: Callable[..., Path]) -> None:
    captions: list[str | None] = [f"a dog {'q' if split_of(f'g{i}', 0.2, 0.2) == 'train' else 'z'}" for i in range(100)]
    folder = downloaded(captions=captions, group=[f"g{i}" for i in range(100)])
    _, counts = prepared(folder, tmp_path / "captions")
    vocabulary = CaptionTokenizer.load(tmp_path / "captions")
    unknown = vocabulary.vocabulary.unk_id
    assert unknown not in vocabulary.encode(["q"])[0]
    assert unknown in vocabulary.encode(["z"])[0]
    assert counts["unknown_tokens"] == counts["splits"]["validation"] + counts["splits"]["test"]


def test_a_tokenizer_may_be_trained_on_some_of_the_captions(
    tmp_path: Path, downloaded: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = downloaded(captions=[f"a dog {chr(0x4E00 + i)}" for i in range(200)])
    used = []
    for most in (40, 80, 1000):
        params = PARAMS.model_copy(update={"tokenizer_captions": most, "vocab_size": 2000})
        prepared(folder, tmp_path / str(most), params)
        vocabulary = CaptionTokenizer.load(tmp_path / str(most))
        unknown = vocabulary.vocabulary.unk_id
        used.append({i for i in range(200) if unknown not in vocabulary.encode([chr(0x4E00 + i)])[0]})
    assert used[0] < used[1] < used[2]
    assert 10 < len(used[0]) < 45


def test_equal_inputs_give_equal_bytes(tmp_path: Path, downloaded: Callable[..., Path], files_of: Callable) -> None:
    folder = downloaded()
    prepared(folder, tmp_path / "one")
    prepared(folder, tmp_path / "two")
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")


def test_a_saved_tokenizer_is_used_again(tmp_path: Path, downloaded: Callable[..., Path]) -> None:
    folder = downloaded()
    one, _ = prepared(folder, tmp_path / "one")
    params = PARAMS.model_copy(update={"tokenizer": str(tmp_path / "one")})
    two, _ = prepared(folder, tmp_path / "two", params)
    assert [list(tokens) for tokens in one["tokens"]] == [list(tokens) for tokens in two["tokens"]]


def test_nothing_left_is_an_error_that_names_the_parameters(tmp_path: Path, downloaded: Callable[..., Path]) -> None:
    folder = downloaded()
    short = PARAMS.model_copy(update={"max_tokens": 2})
    with pytest.raises(UserError, match=r"no caption is left of 45.*too_long.*caption\.max_tokens 2"):
        prepared(folder, tmp_path / "captions", short)
    thin = PARAMS.model_copy(update={"validation_share": 0.0001})
    with pytest.raises(UserError, match=r"'validation' is empty.*caption\.validation_share 0\.0001"):
        prepared(folder, tmp_path / "captions", thin)
    none = PARAMS.model_copy(update={"validation_share": 0.0})
    assert not (tmp_path / "captions").exists()
    _, counts = prepared(folder, tmp_path / "captions", none)
    assert counts["splits"]["validation"] == 0


def test_the_stage_before_must_have_finished(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="mdc stage download"):
        prepare_captions(PARAMS, tmp_path, tmp_path / "captions")
