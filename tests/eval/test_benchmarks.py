"""ARO and SugarCrepe in their published layouts: small worlds of the same shape, and a real model that answers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import Tensor

import mdc
from mdc.errors import UserError
from mdc.eval.answers import answer, averages, write_answers
from mdc.eval.benchmarks import EXPECTED, SUGAR_CREPE, SYMMETRIC, Benchmark, Picture, read_benchmark, sets_of
from mdc.files import read_json
from mdc.objectives.scoring import Scores

COLOURS = {"red": (220, 30, 30), "blue": (30, 60, 220), "green": (30, 200, 40)}


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder of pictures, left half in the first colour of their name and right half in the second."""
    folder = tmp_path / "images"
    folder.mkdir()
    for left in COLOURS:
        for right in COLOURS:
            pixels = np.zeros((10, 20, 3), dtype=np.uint8)
            pixels[:, :10], pixels[:, 10:] = COLOURS[left], COLOURS[right]
            Image.fromarray(pixels).save(folder / f"{left}-{right}.png")
    return folder


def write(tmp_path: Path, name: str, content: Any) -> None:
    (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")


def relation(name: str, box: tuple[int, int, int, int] = (0, 0, 20, 10)) -> dict[str, Any]:
    x, y, w, h = box
    return {
        "image_id": "1",
        "image_path": "red-blue.png",
        "bbox_x": x,
        "bbox_y": y,
        "bbox_w": w,
        "bbox_h": h,
        "relation_name": name,
        "true_caption": f"the red fish is {name} the blue lamp",
        "false_caption": f"the blue lamp is {name} the red fish",
    }


class Knows:
    """Scores a caption 1 if `right` says so of it, blind 0: a model that sees, and nothing else."""

    scorers = ("mc",)

    def __init__(self, right: Callable[[str], float]) -> None:
        self.right = right

    def too_long(self, captions: Any) -> list[bool]:
        return [len(text.split()) > 10 for text in captions]

    def score_seen(self, seen_MPD: Tensor, captions: Any, scorer: str, seeds: Any, draws: int) -> Scores:
        blind = isinstance(seeds, int)  # pictures have a seed each
        value_MK = torch.tensor([[0.0 if blind else float(self.right(text)) for text in row] for row in captions])
        return Scores(value_MK, torch.zeros_like(value_MK))


def see(pictures: Any) -> Tensor:
    return torch.zeros(len(pictures), 1, 1)


def test_the_published_numbers() -> None:
    assert {name: EXPECTED[name] for name in SUGAR_CREPE} == dict(
        add_att=692, add_obj=2062, replace_att=788, replace_obj=1652, replace_rel=1406, swap_att=666, swap_obj=245
    )
    assert sum(EXPECTED[name] for name in SUGAR_CREPE) == 7_511
    assert len(SYMMETRIC) == 157
    assert {"near", "next to", "in front of"} & SYMMETRIC == {"near", "next to"}
    assert list(sets_of("aro")) == ["vg_relation", "vg_attribution", "coco_order", "flickr_order"]
    assert list(sets_of("swap_obj")) == ["swap_obj"]


def test_relations_by_hand(tmp_path: Path, images: Path) -> None:
    """100 of one relation, 1 of another, and 4 symmetric ones that do not count."""
    entries = [relation("on") for _ in range(100)] + [relation("riding")] + [relation("near") for _ in range(4)]
    write(tmp_path, "visual_genome_relation.json", entries)
    benchmark = read_benchmark("vg_relation", tmp_path, images, partial=True)
    assert len(benchmark.questions) == 101
    assert benchmark.left_out == {"symmetric relation": 4}
    (record,) = answer(
        Knows(lambda text: " on " in text and text.startswith("the red")), benchmark, see, ["mc"], 4, 0
    ).records
    assert record["score"] == pytest.approx((100 + 0.5) / 101)
    assert record["score_macro"] == pytest.approx((1 + 0.5) / 2)
    assert record["score_ties"] == 1
    assert record["blind"] == record["chance"] == 0.5


def test_boxes_are_cut_as_the_authors_cut_them(tmp_path: Path, images: Path) -> None:
    write(tmp_path, "visual_genome_relation.json", [relation("on", (10, 0, 10, 10)), relation("on", (15, 5, 10, 10))])
    right, outside = (
        np.asarray(q.picture.open()) for q in read_benchmark("vg_relation", tmp_path, images, partial=True).questions
    )
    assert right.shape == (10, 10, 3)
    assert (right == COLOURS["blue"]).all()
    assert (outside[:5, :5] == COLOURS["blue"]).all()
    assert not outside[5:].any()


def test_attributes_of_few_questions_stay_out_of_the_macro_average(tmp_path: Path, images: Path) -> None:
    def entry(first: str, second: str) -> dict[str, Any]:
        captions = {
            f"{which}_caption": f"the {a} fish and the {b} lamp"
            for which, a, b in (("true", first, second), ("false", second, first))
        }
        return {**relation("on"), **captions, "attributes": [first, second]}

    write(tmp_path, "visual_genome_attribution.json", [entry("red", "blue")] * 25 + [entry("wet", "dry")] * 24)
    benchmark = read_benchmark("vg_attribution", tmp_path, images, partial=True)
    answers = answer(Knows(lambda text: text.startswith("the red")), benchmark, see, ["mc"], 4, 0)
    assert answers.records[0]["score_macro"] == 1
    assert answers.records[0]["score"] == pytest.approx((25 + 12) / 49)
    assert {row["row"]: (row["score"], row["questions"]) for row in answers.rows} == {
        "red_blue": (1, 25),
        "wet_dry": (0.5, 24),
    }


def crepe(caption: str, foil: str, filename: str = "red-blue.png") -> dict[str, str]:
    return {"filename": filename, "caption": caption, "negative_caption": foil}


def test_sugar_crepe_is_read_by_its_keys(tmp_path: Path, images: Path) -> None:
    entries = {key: crepe("a red fish", "a blue fish") for key in ("0", "1", "3")}
    entries["7"] = crepe("the same", "the  same ")
    write(tmp_path, "swap_obj.json", entries)
    benchmark = read_benchmark("swap_obj", tmp_path, images, partial=True)
    assert [q.key for q in benchmark.questions] == ["0", "1", "3", "7"]
    assert benchmark.identical == ["7"]
    (record,) = answer(Knows(lambda text: "red" in text), benchmark, see, ["mc"], 4, 0).records
    assert (record["questions"], record["score"], record["score_ties"]) == (4, 3.5 / 4, 1)


def test_missing_pictures_are_listed(tmp_path: Path, images: Path) -> None:
    write(tmp_path, "add_att.json", {str(i): crepe("a", "b", f"{i}.jpg") for i in range(30)})
    with pytest.raises(UserError, match=r"30 pictures are not in .*images: 0\.jpg, 1\.jpg, .* and 10 more"):
        read_benchmark("add_att", tmp_path, images, partial=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"0": {"filename": "red-blue.png", "caption": "a"}}', "entry 0 has no negative_caption"),
        ("{", "is no JSON file"),
        ('["a"]', "entry 0 is no mapping"),
    ],
)
def test_files_of_another_shape_are_refused(tmp_path: Path, images: Path, content: str, message: str) -> None:
    (tmp_path / "add_att.json").write_text(content)
    with pytest.raises(UserError, match=message):
        read_benchmark("add_att", tmp_path, images, partial=True)


def test_another_number_of_questions_is_no_benchmark(tmp_path: Path, images: Path) -> None:
    with pytest.raises(UserError, match=r"add_att\.json is not there"):
        read_benchmark("add_att", tmp_path, images)
    write(tmp_path, "add_att.json", {"0": crepe("a", "b")})
    with pytest.raises(UserError, match="holds 1 questions, 692 were published"):
        read_benchmark("add_att", tmp_path, images)


ORDER = [
    {"image": "val2014/red-blue.png", "caption": ["A red fish beside a blue lamp.", "Fish", "the the"]},
    {"image": "val2014/red-green.png", "caption": ["Two green lamps stand on a red box"]},
]


def test_order_sets_keep_their_shuffles(tmp_path: Path, images: Path) -> None:
    """Pictures are found in a flat folder too; what cannot be shuffled is left out and counted."""
    write(tmp_path, "coco_karpathy_test.json", ORDER)
    benchmark = read_benchmark("coco_order", tmp_path, images, seed=5, partial=True)
    assert benchmark.left_out == {"no other order": 2}
    assert [(q.key, len(q.foils), q.picture.path.parent) for q in benchmark.questions] == [
        ("0-0", 4, images),
        ("1-0", 4, images),
    ]
    assert all(foil != q.caption for q in benchmark.questions for foil in q.foils)
    assert read_benchmark("coco_order", tmp_path, images, seed=5, partial=True) == benchmark
    assert read_benchmark("coco_order", tmp_path, images, seed=6, partial=True) != benchmark

    answers = answer(Knows(lambda text: 0.0), benchmark, see, ["mc"], 4, 0)
    assert answers.records[0]["score"] == answers.records[0]["chance"] == pytest.approx(1 / 5)
    write_answers(tmp_path / "out", [answers], {})
    (tmp_path / "stored").mkdir()
    (tmp_path / "out" / "shuffles-coco_karpathy_test.json").rename(tmp_path / "stored" / "coco_karpathy_test.json")
    again = read_benchmark("coco_order", tmp_path / "stored", images, seed=99, partial=True)
    assert [q.foils for q in again.questions] == [q.foils for q in benchmark.questions]
    assert again.left_out == benchmark.left_out


def test_captions_too_long_for_the_model_are_refused_or_left_out(tmp_path: Path, images: Path) -> None:
    write(tmp_path, "add_att.json", {"0": crepe("a red fish", "a blue fish"), "1": crepe("a fish", "a " * 11)})
    benchmark = read_benchmark("add_att", tmp_path, images, partial=True)
    subject = Knows(len)
    with pytest.raises(UserError, match="1 of 2 questions have captions longer than the model takes"):
        benchmark.shorter(subject.too_long, skip=False)
    assert [q.key for q in benchmark.shorter(subject.too_long, skip=True).questions] == ["0"]
    assert benchmark.shorter(subject.too_long, skip=True).left_out == {"too long": 1}


def test_both_averages_of_several_sets() -> None:
    records = [
        {"scorer": "mc", "questions": n, "score": s, "blind": 0.5, "pmi": s} for n, s in ((300, 0.9), (100, 0.5))
    ]
    (means,) = averages(records)
    assert means["score_micro"] == pytest.approx(0.8)
    assert means["score_macro"] == pytest.approx(0.7)
    assert (means["sets"], means["questions"]) == (2, 400)


def test_all_scorers_of_a_model_side_by_side(
    tmp_path: Path, images: Path, model: Path, make_model: Callable[..., Path], shards: Path
) -> None:
    entries = {str(i): crepe("red fish", "blue fish", f"{left}-red.png") for i, left in enumerate(COLOURS)}
    write(tmp_path, "add_att.json", entries)
    benchmark = read_benchmark("add_att", tmp_path, images, partial=True)
    captioner = mdc.load(model)
    answers = ask(captioner, benchmark)
    assert [record["scorer"] for record in answers.records] == ["mc", "heuristic", "unmask"]
    assert [record["caption_stderr"] > 0 for record in answers.records] == [True, False, False]
    for row in answers.questions:
        direct = captioner.score(images / row["picture"], [[row["caption"], *row["foils"]]], row["scorer"])
        if row["scorer"] != "mc":  # whose random numbers hang on the picture's name
            np.testing.assert_allclose(direct[0], [row["caption_score"], *row["foil_scores"]], atol=1e-4)
    write_answers(tmp_path / "out", [answers], {"model": captioner.fingerprint})
    assert len(pd.read_parquet(tmp_path / "out" / "questions.parquet")) == 9
    assert read_json(tmp_path / "out" / "results.json")["sets"] == answers.records
    towers = mdc.load(make_model(tmp_path / "siglip", shards, objective="siglip"))
    assert [record["scorer"] for record in ask(towers, benchmark).records] == ["cosine"]


def ask(model: Any, benchmark: Benchmark) -> Any:
    def look(pictures: list[Picture]) -> Tensor:
        return model.see([picture.open() for picture in pictures])

    return answer(model, benchmark, look, model.scorers, draws=4, seed=0)
