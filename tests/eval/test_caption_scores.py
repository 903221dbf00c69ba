"""Scores of written captions: against values worked out by hand, and the table of a whole evaluation."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mdc.config import Params
from mdc.eval.caption_scores import caption_scores, plain_words, score_written
from mdc.eval.evaluate import evaluate
from mdc.eval.features import extract_features
from mdc.files import read_json
from mdc.train.checkpoint import load_model


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("  A Man:  light-skin tone!", "a man light skin tone"),
        ("ten o ' clock - sharp", "ten o clock sharp"),
        ("ten o'clock-sharp", "ten o clock sharp"),
        ("Straße № 5", "strasse no 5"),
        ("हिन्दी", "हिन्दी"),
        ("?! 🙂", ""),
    ],
)
def test_words_are_plain(text: str, words: str) -> None:
    assert plain_words(text) == words


def test_true_captions_reach_the_best_scores() -> None:
    texts = ["a red circle on a hill", "the blue square by the sea", "one green star over a road"]
    found = caption_scores(texts, [[text.upper() + "."] for text in texts])
    assert found["cider"] == pytest.approx(10)
    assert [found[f"bleu_{n}"] for n in (1, 2, 3, 4)] == pytest.approx([1] * 4, abs=1e-6)
    assert found["rouge_l"] == pytest.approx(1)


def test_values_worked_out_by_hand() -> None:
    found = caption_scores(["a red square", "blue moon"], [["a red circle now"], ["blue moon"]])
    # BLEU: 4 of 5 words and 2 of 3 pairs of words occur; 5 words were written for 6, so all is cut by exp(1 - 6/5)
    shorter = math.exp(1 - 6 / 5)
    assert found["bleu_1"] == pytest.approx(shorter * 4 / 5, abs=1e-6)
    assert found["bleu_2"] == pytest.approx(shorter * math.sqrt(4 / 5 * 2 / 3), abs=1e-6)
    # ROUGE-L: of "a red square" 2 of 3 words are in order in the reference, which has 4; beta is 1.2
    precision, recall, beta2 = 2 / 3, 2 / 4, 1.2**2
    first = (1 + beta2) * precision * recall / (recall + beta2 * precision)
    assert found["rouge_l"] == pytest.approx((first + 1) / 2)
    # CIDEr: every run of words is in one of two references, so all weigh alike, and "square" counts as if it were too
    # rare to be in none: log(2 / 1). Cosines are 2/sqrt(3 x 4), 1/sqrt(2 x 3), 0 and 0; two pairs of words against
    # three make the penalty exp(-1 / (2 x 6^2)). The second caption is right, but has no runs of three or four words.
    cosines = 2 / math.sqrt(12) + 1 / math.sqrt(6)
    assert found["cider"] == pytest.approx((10 / 4 * cosines * math.exp(-1 / 72) + 10 / 4 * 2) / 2)


def test_the_best_of_several_references_counts() -> None:
    one = caption_scores(["a red square", "x"], [["green boat"], ["y"]])
    two = caption_scores(["a red square", "x"], [["green boat", "a red square"], ["y"]])
    assert one["bleu_1"] < 1e-6
    assert two["bleu_1"] == pytest.approx(3 / 4, abs=1e-6)


def test_nothing_written_is_worth_nothing() -> None:
    found = caption_scores(["", ""], [["a red square"], ["blue moon"]])
    assert all(value == pytest.approx(0, abs=1e-6) for value in found.values())


def test_rows_by_sampler_and_length(model: Path) -> None:
    loaded, written = load_model(model, torch.device("cpu")), []
    patches_MPD = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(0))
    rows = score_written(loaded, patches_MPD, [["red sock"]] * 3, [3, 5], 0, written.append)
    assert [(row["sampler"], row["length"]) for row in rows] == [
        ("confidence", 3),
        ("confidence", 5),
        ("ancestral", 3),
        ("ancestral", 5),
    ]
    assert written == [3] * 8
    assert set(rows[0]["blind"]) == {"cider", "bleu_1", "bleu_2", "bleu_3", "bleu_4", "rouge_l"}


def test_an_evaluation_scores_a_bounded_number_of_test_pictures(
    params: Callable[..., Params], make_model: Callable[..., Path], shards: Path, tmp_path: Path
) -> None:
    small = params(
        evaluate={"probe_epochs": 1, "probe_seeds": 1, "swaps": {}, "metric_pictures": 5}, extract={"floors": False}
    )
    for objective in ("autoregressive", "clip"):
        model = make_model(tmp_path / objective / "model", shards, objective=objective)
        extract_features(small, shards, model, tmp_path / "cache", tmp_path / objective / "features")
        evaluate(small, shards, model, tmp_path / objective / "features", tmp_path / objective / "out")
    scores = read_json(tmp_path / "autoregressive" / "out" / "captions.json")["scores"]
    assert scores["pictures"] == scores["references"] == 5
    metrics = read_json(tmp_path / "autoregressive" / "out" / "metrics.json")["captioning"]
    assert list(metrics) == ["autoregressive"]
    assert sorted(metrics["autoregressive"]) == ["3", "5"]
    row = next(row for row in scores["rows"] if row["length"] == 3)
    assert metrics["autoregressive"]["3"] == {k: v for k, v in row.items() if k not in ("sampler", "length")}
    assert "captioning" not in read_json(tmp_path / "clip" / "out" / "metrics.json")
    assert "scores" not in read_json(tmp_path / "clip" / "out" / "captions.json")
