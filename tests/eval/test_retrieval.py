import json
from collections.abc import Callable, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import mdc
from mdc.errors import UserError
from mdc.eval.references import read_references
from mdc.eval.retrieval import Scored, belonging, found_at, retrieval, score_matrix, zero_shot, zero_shot_texts
from mdc.objectives.scoring import Scores


def by_all_orders(scores: np.ndarray, right: np.ndarray, k: int) -> float:
    """The share of all orders of the candidates, sorted stably by score, with a right one among the first k."""
    hits = [
        right[list(sorted(order, key=lambda c: -scores[c]))[:k]].any() for order in permutations(range(len(scores)))
    ]
    return float(np.mean(hits))


def test_ties_are_averaged_over_all_orders() -> None:
    random = np.random.default_rng(0)
    scores, right = random.integers(3, size=(12, 5)).astype(float), random.random((12, 5)) < 0.4
    right[:, 2] = True
    found = found_at(scores, right, [1, 2, 3, 5])
    for row in range(12):
        expected = [by_all_orders(scores[row], right[row], k) for k in (1, 2, 3, 5)]
        np.testing.assert_allclose(found[row], expected, atol=1e-12)


def test_a_constant_scorer_gets_exactly_chance() -> None:
    right = np.eye(20, dtype=bool)
    np.testing.assert_allclose(found_at(np.zeros((20, 20)), right, [1, 5, 10]).mean(0), [0.05, 0.25, 0.5])


def test_order_of_candidates_changes_nothing() -> None:
    random = np.random.default_rng(1)
    scores, right = random.integers(4, size=(30, 8)).astype(float), np.eye(30, 8, dtype=bool)
    right[~right.any(1), 3] = True
    order = random.permutation(8)
    np.testing.assert_array_equal(found_at(scores, right, [1, 5]), found_at(scores[:, order], right[:, order], [1, 5]))


def test_no_number_and_no_right_candidate_are_errors() -> None:
    with pytest.raises(UserError, match="not numbers"):
        found_at(np.array([[np.nan, 1.0]]), np.array([[True, False]]), [1])
    with pytest.raises(UserError, match="query 1 has no right candidate"):
        found_at(np.zeros((2, 2)), np.array([[True, False], [False, False]]), [1])


def test_pmi_takes_away_what_the_text_alone_is_worth() -> None:
    """One text is likely anyway and wins every picture by score; every text finds its picture all the same."""
    blind = np.array([0.0, 10.0, 0.0])
    found = retrieval(Scored(np.eye(3) + blind, blind), np.eye(3, dtype=bool))
    assert found["picture_to_text"]["score"]["recall_at_1"] == pytest.approx(1 / 3)
    assert found["picture_to_text"]["pmi"]["recall_at_1"] == 1
    assert found["text_to_picture"]["score"]["recall_at_1"] == 1
    assert found["text_to_picture"]["chance"]["recall_at_1"] == pytest.approx(1 / 3)


def test_equal_texts_are_one() -> None:
    texts, right = belonging([["a", "b"], ["c"], ["a"]])
    assert texts == ["a", "b", "c"]
    assert right.tolist() == [[True, True, False], [False, False, True], [True, False, False]]


def test_zero_shot_by_hand() -> None:
    """Four pictures of three classes of unequal size, two templates each."""
    texts = zero_shot_texts(["dog", "cat", "fox"], ["a {}", "the {}"])
    assert texts == ["a dog", "the dog", "a cat", "the cat", "a fox", "the fox"]
    per_class = np.array([[3.0, 1, 0], [3, 1, 0], [1, 2, 0], [5, 2, 2]])
    score = np.stack([per_class - 1, per_class + 1], axis=2).reshape(4, 6)
    blind = np.array([0.0, 0, 9, 9, 0, 0])
    found = zero_shot(Scored(score, blind), np.array([0, 0, 1, 2]), templates=2)
    assert found["score"] == {"top_1": pytest.approx(3 / 4), "balanced": pytest.approx(2 / 3)}
    assert found["blind"]["top_1"] == pytest.approx(1 / 4)
    assert found["chance"] == pytest.approx(1 / 3)
    with pytest.raises(UserError, match="no place for the class"):
        zero_shot_texts(["dog"], ["a photo"])


class Counting:
    """Scores a text by the picture's number; remembers which pictures it was shown."""

    scorers = ("mc",)

    def __init__(self) -> None:
        self.seen = list[int]()

    def see(self, keys: Sequence[int]) -> Tensor:
        self.seen += keys
        return torch.tensor(keys).float().view(-1, 1, 1)

    def too_long(self, captions: Sequence[str]) -> list[bool]:
        return [False] * len(captions)

    def score_seen(self, seen_MPD: Tensor, captions: Any, scorer: str, seeds: Any, draws: int) -> Scores:
        value_MK = -(seen_MPD[:, :, 0] - torch.tensor([float(text) for text in captions[0]])).abs()
        return Scores(value_MK, torch.zeros_like(value_MK))


def test_every_picture_is_seen_once() -> None:
    subject, keys = Counting(), list(range(150))
    scored = score_matrix(subject, keys, subject.see, [str(key) for key in keys], "mc", 2, 0)
    assert subject.seen == keys
    assert retrieval(scored, np.eye(150, dtype=bool))["picture_to_text"]["score"]["recall_at_1"] == 1
    np.testing.assert_allclose(scored.blind_K, -np.abs(74.5 - np.arange(150)))


@pytest.mark.parametrize("objective", ["mdc", "siglip"])
def test_a_matrix_is_made_of_single_scores(
    make_model: Callable[..., Path], shards: Path, tmp_path: Path, objective: str
) -> None:
    model: Any = mdc.load(make_model(tmp_path / "model", shards, objective=objective), "cpu")
    pictures = list(torch.randint(0, 256, (5, 3, 12, 12), generator=torch.Generator().manual_seed(0)).to(torch.uint8))
    texts = ["red fish", "blue lamp", "green moon star"]
    for scorer in model.scorers:
        scored = score_matrix(model, pictures, lambda keys: model.see(torch.stack(keys)), texts, scorer, 4, 0)
        assert scored.score_MK.shape == (5, 3)
        if scorer != "mc":  # whose random numbers hang on the seed's name
            direct = model.score(torch.stack(pictures), [texts] * 5, scorer)
            np.testing.assert_allclose(scored.score_MK, direct, atol=1e-4)


COCO = {
    "images": [{"id": 7, "file_name": "a.png"}, {"id": 9, "file_name": "b.png"}],
    "annotations": [
        {"image_id": 9, "caption": "two"},
        {"image_id": 7, "caption": "one"},
        {"image_id": 9, "caption": "2"},
    ],
}
LIST = [{"image": "x/a.png", "caption": "one"}, {"image": "x/b.png", "caption": ["two", "2"]}]
KARPATHY = {
    "images": [
        {"filename": "a.png", "filepath": "x", "sentences": [{"raw": "one"}], "split": "test"},
        {"filename": "c.png", "sentences": [{"raw": "three"}], "split": "train"},
        {"filename": "b.png", "sentences": [{"raw": "two"}, {"raw": "2"}], "split": "test"},
    ]
}


@pytest.mark.parametrize("content", [COCO, LIST, KARPATHY], ids=["coco", "list", "karpathy"])
def test_files_of_captions(tmp_path: Path, content: Any) -> None:
    for name in "ab":
        Image.new("RGB", (4, 4)).save(tmp_path / f"{name}.png")
    (tmp_path / "captions.json").write_text(json.dumps(content))
    found = read_references(tmp_path / "captions.json", tmp_path)
    assert [(each.picture.path.name, each.captions) for each in found] == [("a.png", ("one",)), ("b.png", ("two", "2"))]
    assert len(read_references(tmp_path / "captions.json", tmp_path, limit=1)) == 1
    (tmp_path / "b.png").unlink()
    with pytest.raises(UserError, match=r"1 pictures are not in .*b\.png"):
        read_references(tmp_path / "captions.json", tmp_path)


def test_other_files_are_no_captions(tmp_path: Path) -> None:
    for text in ('{"a": 1}', "[1]", "{"):
        (tmp_path / "captions.json").write_text(text)
        with pytest.raises(UserError, match="is no file of captions"):
            read_references(tmp_path / "captions.json", tmp_path)
