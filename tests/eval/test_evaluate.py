from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mdc.config import Params
from mdc.data.tokenizer import CaptionTokenizer
from mdc.errors import UserError
from mdc.eval import compositional
from mdc.eval.captioning import template_of
from mdc.eval.classification import classify
from mdc.eval.compositional import Pair
from mdc.eval.evaluate import choose_pictures, evaluate
from mdc.eval.features import Features, extract_features, read_features
from mdc.eval.measures import margin
from mdc.files import read_json, read_manifest
from mdc.objectives.scoring import Scores

PARTS = ("metrics", "headline", "probe", "compositional", "retrieval", "captions", "neighbours")


@pytest.fixture(scope="module")
def evaluated(
    params: Callable[..., Params],
    shards: Path,
    model: Path,
    features: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("evaluation") / "evaluation"
    evaluate(params(), shards, model, features, folder)
    return {"folder": folder} | {name: read_json(folder / f"{name}.json") for name in PARTS}


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    return [value]


def test_metrics_are_numbers_alone(evaluated: dict[str, Any]) -> None:
    assert all(type(leaf) in (int, float) for leaf in leaves(evaluated["metrics"]))
    parts = {"probe", "knn", "compositional", "retrieval", "zero_shot", "captioning", "index"}
    assert set(evaluated["metrics"]) == parts
    assert evaluated["metrics"]["index"]["recall_at_10"] == 1


def test_the_headline_repeats_metrics(evaluated: dict[str, Any]) -> None:
    headline, metrics = evaluated["headline"], evaluated["metrics"]
    assert set(headline["probe"]) == {"model", "untrained", "pixels", "majority"}
    for name, row in headline["probe"].items():
        assert row == {measure: metrics["probe"][name][measure] for measure in ("accuracy", "balanced_accuracy")}
    pairs = metrics["compositional"]["all"]
    assert headline["pairs"] == {name: pairs[name] for name in ("mc", "blind", "pmi")}


def test_bytes_repeat(
    params: Callable[..., Params], shards: Path, model: Path, features: Path, evaluated: dict[str, Any], tmp_path: Path
) -> None:
    evaluate(params(), shards, model, features, tmp_path / "again")
    for file in sorted(evaluated["folder"].iterdir()):
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name


def test_colours_are_read_off_every_feature_set(evaluated: dict[str, Any]) -> None:
    probe = evaluated["probe"]
    assert probe["classes"] == ["blue", "green", "red"]
    assert (probe["train"], probe["test"]) == (42, 18)
    assert [row["features"] for row in probe["rows"]] == ["model", "untrained", "pixels", "majority"]
    for row in probe["rows"][:3]:
        assert row["accuracy_mean"] > 0.8
        assert len(row["accuracy"]) == 2
        assert row["accuracy_low"] <= row["accuracy_mean"] <= row["accuracy_high"]
        assert evaluated["metrics"]["probe"][row["features"]]["accuracy"] == row["accuracy_mean"]
        assert evaluated["metrics"]["knn"][row["features"]]["10"]["accuracy"] > 0.8
    assert probe["rows"][3]["accuracy_mean"] == pytest.approx(1 / 3, abs=1e-5)
    assert [each["over"] for each in probe["margins"]] == ["untrained", "pixels"]


def test_pairs_are_scored_with_their_controls(evaluated: dict[str, Any]) -> None:
    rules = {row["rule"]: row for row in evaluated["compositional"]["rules"]}
    assert evaluated["compositional"]["scorer"] == "mc"
    assert rules["colour"]["pairs"] == 5 * 3 * 2 * 2
    assert set(rules) == {"colour", "thing", "thing (foil trained on)"}
    for name in (*rules, "all"):
        row = evaluated["metrics"]["compositional"][name]
        for score in ("mc", "blind", "pmi"):
            assert 0 <= row[score] <= 1
    assert rules["colour"]["blind"] == 0.5  # each pair has its mirror image, and blind scores ignore the picture
    fair = [row for name, row in rules.items() if "trained" not in name]
    total = evaluated["metrics"]["compositional"]["all"]
    assert total["pairs"] == sum(row["pairs"] for row in fair)
    assert total["mc"] == pytest.approx(sum(row["mc"] * row["pairs"] for row in fair) / total["pairs"], abs=1e-5)
    assert evaluated["compositional"]["examples"]


def test_pictures_are_found_by_their_captions_and_classes_by_their_names(evaluated: dict[str, Any]) -> None:
    found = evaluated["retrieval"]
    assert found["scorer"] == "heuristic"
    ways = found["retrieval"]
    assert (ways["pictures"], ways["texts"]) == (18, 9)  # every caption has two pictures
    assert ways["picture_to_text"]["chance"]["recall_at_1"] == pytest.approx(1 / 9, abs=1e-5)
    assert ways["text_to_picture"]["chance"]["recall_at_1"] == pytest.approx(2 / 18, abs=1e-5)
    for way, name in (("picture_to_text", "score"), ("picture_to_text", "pmi"), ("text_to_picture", "score")):
        recalls = [ways[way][name][f"recall_at_{k}"] for k in (1, 5, 10)]
        assert 0 <= recalls[0] <= recalls[1] <= recalls[2] <= 1
    told = found["zero_shot"]
    assert (told["pictures"], told["classes"]) == (18, 3)
    assert told["blind"]["balanced"] == told["chance"] == pytest.approx(1 / 3, abs=1e-5)
    assert evaluated["metrics"]["zero_shot"] == told


def test_captions_and_neighbours_are_of_test_pictures(evaluated: dict[str, Any], features: Path) -> None:
    rows = read_features(features).samples.set_index("uid")
    captions, neighbours = evaluated["captions"], evaluated["neighbours"]["examples"]
    assert len(captions["examples"]) == len(neighbours) == 4
    for example in [*captions["examples"], *neighbours]:
        assert rows.loc[example["uid"], "split"] == "test"
        assert rows.loc[example["uid"], "caption"] == example["caption"]
    for near in (near for example in neighbours for near in example["neighbours"]):
        assert rows.loc[near["uid"], "split"] == "train"
    first, *_, last = captions["unmasking"]["steps"]
    assert first == ["[MASK]"] * 3 + ["[EOS]"]
    assert "[MASK]" not in last
    assert len(captions["unmasking"]["steps"]) == 4
    for filled in captions["filled"]:
        assert filled["template"].count("[MASK]") == 1


def test_features_of_another_model_are_refused(
    params: Callable[..., Params], make_model: Callable[..., Path], shards: Path, features: Path, tmp_path: Path
) -> None:
    other = make_model(tmp_path / "other", shards, seed=2)
    with pytest.raises(UserError, match="run `mdc stage extract`"):
        evaluate(params(), shards, other, features, tmp_path / "out")


def test_parts_that_cannot_be_made_are_left_out_with_a_note(
    params: Callable[..., Params], make_model: Callable[..., Path], unlabelled: Path, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", unlabelled, objective="siglip")
    extract_features(params(), unlabelled, model, tmp_path / "cache", tmp_path / "features")
    no_swaps = params(evaluate={"swaps": {"colour": [["red", "purple"]], "thing": []}})
    evaluate(no_swaps, unlabelled, model, tmp_path / "features", tmp_path / "out")
    found = {name: read_json(tmp_path / "out" / f"{name}.json") for name in PARTS}
    assert found["probe"]["rows"] == found["compositional"]["rules"] == found["captions"]["examples"] == []
    assert set(read_manifest(tmp_path / "out", "evaluate")["notes"]) == {"probe", "compositional", "captions"}
    assert set(found["metrics"]) == {"compositional", "retrieval", "index"}
    assert found["metrics"]["compositional"] == {}


@pytest.mark.parametrize("objective", ["siglip", "autoregressive", "bert"])
def test_other_objectives_bring_their_own_scorer(
    params: Callable[..., Params], make_model: Callable[..., Path], shards: Path, tmp_path: Path, objective: str
) -> None:
    model = make_model(tmp_path / "model", shards, objective=objective)
    small = params(evaluate={"probe_epochs": 1, "probe_seeds": 1}, extract={"floors": False})
    extract_features(small, shards, model, tmp_path / "cache", tmp_path / "features")
    evaluate(small, shards, model, tmp_path / "features", tmp_path / "out")
    compared = read_json(tmp_path / "out" / "compositional.json")
    scorer = {"siglip": "cosine", "autoregressive": "autoregressive", "bert": "heuristic"}[objective]
    assert compared["scorer"] == scorer
    assert all(scorer in row for row in compared["rules"])
    written = read_json(tmp_path / "out" / "captions.json")
    assert bool(written["examples"]) == (objective != "siglip")
    assert ("unmasking" in written) == (objective == "bert")


def test_a_class_only_in_test_counts_as_wrong(params: Callable[..., Params], features: Path) -> None:
    found = read_features(features)
    rows = found.samples.copy()
    new = rows.index[rows["split"] == "test"][:6]
    rows.loc[new, "label"] = "purple"
    changed = Features(rows, {"model": found.arrays["model"]}, found.fingerprint, found.index)
    probe, _ = classify(params().evaluate, changed, torch.device("cpu"), "colour")
    assert probe["classes_only_in_test"] == ["purple"]
    assert probe["test"] == 18
    row = probe["rows"][0]
    assert row["accuracy_mean"] <= 12 / 18
    assert row["recall_by_class"]["classes only in test"] == 0


def test_shown_pictures_are_of_many_classes_and_groups(features: Path) -> None:
    found = read_features(features)
    rows = found.samples.set_index("uid")
    chosen = rows.loc[choose_pictures(found, "test", 9, seed=0)]
    assert len(chosen) == 9
    assert chosen["label"].value_counts().tolist() == [3, 3, 3]
    assert not chosen.duplicated(["label", "group"]).any()
    assert choose_pictures(found, "test", 3, seed=0) != choose_pictures(found, "test", 3, seed=1)


def test_margin_over_a_floor() -> None:
    truth = np.array([0] * 50 + [1] * 50)
    ours, theirs = truth[None].repeat(2, 0), np.zeros((2, 100), int)
    found = margin(ours, theirs, truth, np.arange(100).astype(str), seed=0)
    assert found["accuracy"] == found["balanced_accuracy"] == 0.5
    assert found["balanced_accuracy_low"] == found["balanced_accuracy_high"] == 0.5
    # a share of 0.5 of 100 rows has a standard error of 0.05
    assert found["accuracy_low"] == pytest.approx(0.5 - 1.96 * 0.05, abs=0.02)
    assert found["accuracy_high"] == pytest.approx(0.5 + 1.96 * 0.05, abs=0.02)
    paired = margin(ours, theirs, truth, np.repeat(["a", "b", "c", "d"], 25), seed=0)
    assert paired["accuracy_high"] - paired["accuracy_low"] > 0.5


PAIRS = [
    Pair("u1", "red sock", "blue sock", "colour", fair=True),
    Pair("u2", "blue sock", "red sock", "colour", fair=True),
    Pair("u2", "blue sock", "a green sock", "colour", fair=True),
    Pair("u3", "red bird", "blue bird", "bird", fair=False),
]


class StandIn:
    """Scores `value(picture's number or 0 if blind, caption)`, and remembers what it was asked."""

    scorers = ("mc",)

    def __init__(self, value: Callable[[int, str], float]) -> None:
        self.value, self.calls = value, list[tuple[int, str]]()

    def too_long(self, captions: Sequence[str]) -> list[bool]:
        return [False] * len(captions)

    def score_seen(
        self, seen_MPD: Tensor, captions: Sequence[Sequence[str]], scorer: str, seeds: Any, draws: int
    ) -> Scores:
        images = seen_MPD[:, 0, 0].int().tolist()
        self.calls += [(image, text) for image, row in zip(images, captions, strict=True) for text in row]
        numbers = [[self.value(image, text) for text in row] for image, row in zip(images, captions, strict=True)]
        return Scores(torch.tensor(numbers), torch.full((len(images), len(captions[0])), 3.0))


def scored(value: Callable[[int, str], float]) -> list[dict[str, Any]]:
    """Rows of results where a stand-in gives the scores."""
    subject = StandIn(value)
    scores = compositional.score_pairs(
        PAIRS,
        subject,
        lambda uids: torch.tensor([float(uid[1:]) for uid in uids]).view(-1, 1, 1),
        torch.zeros(1, 1),
        "mc",
        draws=4,
        seed=0,
    )
    assert len(subject.calls) == len(set(subject.calls)) == 7 + 5  # once per picture, and once blind
    np.testing.assert_allclose(scores.stderr, 18**0.5)
    return compositional.result_rows(PAIRS, scores, "mc")


def test_a_scorer_that_knows_wins_every_pair_and_none_blind() -> None:
    truth = {1: "red sock", 2: "blue sock", 3: "red bird"}
    rows = scored(lambda image, text: float(truth.get(image) == text))
    assert [(row["rule"], row["pairs"], row["mc"], row["blind"], row["ties"]) for row in rows] == [
        ("all", 3, 1.0, 0.5, 0),
        ("colour", 3, 1.0, 0.5, 0),
        ("bird (foil trained on)", 1, 1.0, 0.5, 0),
    ]
    assert rows[0]["blind_ties"] == 3


def test_pmi_takes_the_preference_for_words_away() -> None:
    truth = {1: "red sock", 2: "blue sock", 3: "red bird"}

    def biased(image: int, text: str) -> float:
        return float(truth.get(image) == text) + 5 * len(text)

    rows = scored(biased)
    assert rows[0]["mc"] == rows[0]["blind"] == pytest.approx(1 / 3)
    assert rows[0]["pmi"] == 1


def test_a_constant_scorer_is_at_chance_everywhere() -> None:
    for row in scored(lambda image, text: -1.5):
        assert row["mc"] == row["blind"] == row["pmi"] == 0.5
        assert row["ties"] == row["blind_ties"] == row["pmi_ties"] == row["pairs"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_score_that_is_not_finite_names_the_pair(bad: float) -> None:
    with pytest.raises(UserError, match="'red bird' at u3, which is no finite score"):
        scored(lambda image, text: bad if "bird" in text else 0.0)


def test_gaps_are_for_one_learnable_token(shards: Path) -> None:
    tokenizer = CaptionTokenizer.load(shards / "tokenizer.json")
    known = {"red": 20, "sock": 9, "zzz": 9, "moon": 1}
    assert template_of("red sock", tokenizer, known) == "red [MASK]"
    assert template_of("red zzz", tokenizer, known) == "[MASK] zzz"
    assert template_of("red moon", tokenizer, known) == "[MASK] moon"
    assert template_of("sock", tokenizer, known) is None
    assert template_of("moon moon", tokenizer, known) is None
