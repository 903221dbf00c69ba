"""A model's answers to published sets of captions with foils: accuracy by every scorer, beside its controls.

results.json       per set and scorer: accuracy with standard error, macro, blind, pmi, ties; averages of several sets
rows.parquet       the same per relation or attribute pair
questions.parquet  every score behind them
shuffles-*.json    the foils of order sets, in the layout of their file: read again, they give the same questions
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from mdc.eval import choice
from mdc.eval.benchmarks import EXPECTED, FILES, Benchmark, Picture, Question
from mdc.eval.scored import Subject, TextScores, score_texts
from mdc.files import whole_folder, write_json, write_manifest

CONTROLS = ("score", "blind", "pmi")


@dataclass(frozen=True)
class Answers:
    """One set's results: one record per scorer, per (scorer, row), and per (scorer, question)."""

    benchmark: Benchmark
    records: list[dict[str, Any]]
    rows: list[dict[str, Any]]
    questions: list[dict[str, Any]]


def answer(
    subject: Subject,
    benchmark: Benchmark,
    see: Callable[[Sequence[Picture]], Tensor],
    scorers: Sequence[str],
    draws: int,
    seed: int,
    on_scored: Callable[[int], object] = lambda count: None,
) -> Answers:
    """Score every question of a set by every scorer; each picture is seen once. on_scored: see `score_texts`."""
    captions = captions_of(benchmark.questions)
    scores = score_texts(subject, captions, see, scorers, draws, seed, on_scored=on_scored)
    answers = Answers(benchmark, [], [], [])
    for scorer in scorers:
        _add(answers, scorer, scores[scorer])
    return answers


def captions_of(questions: Sequence[Question]) -> dict[Picture, list[str]]:
    """All captions and foils of every picture, each once."""
    captions: dict[Picture, dict[str, None]] = {}
    for question in questions:
        captions.setdefault(question.picture, {}).update(dict.fromkeys((question.caption, *question.foils)))
    return {picture: list(texts) for picture, texts in captions.items()}


def _add(answers: Answers, scorer: str, scores: TextScores[Picture]) -> None:
    benchmark = answers.benchmark
    questions, rows = benchmark.questions, [question.row for question in benchmark.questions]
    pictures = [str(question.picture.path) for question in questions]
    caption, foils, blind_caption, blind_foils = _numbers(questions, scores)
    sides = {
        "score": (caption, foils),
        "blind": (blind_caption, blind_foils),
        "pmi": (caption - blind_caption, [a - b for a, b in zip(foils, blind_foils, strict=True)]),
    }
    record: dict[str, Any] = {
        "set": benchmark.name,
        "scorer": scorer,
        "questions": len(questions),
        "published": EXPECTED[benchmark.name],
        "left_out": benchmark.left_out,
        "pictures": len(set(pictures)),
        "chance": float(np.mean([1 / (1 + len(question.foils)) for question in questions])),
        "identical": benchmark.identical,
    }
    worth = {}
    for name, (right, wrong) in sides.items():
        worth[name], tied = choice.credit(right, wrong)
        found = choice.share(worth[name], tied, pictures)
        record |= {name: found.value, f"{name}_stderr": found.stderr, f"{name}_ties": found.ties}
        if any(rows):
            record[f"{name}_macro"] = choice.macro(worth[name], rows, benchmark.macro_at_least)
    errors = [scores.stderr[question.picture, question.caption] for question in questions]
    record["caption_stderr"] = float(np.mean(errors))  # of one caption's score: 0 for exact scorers
    answers.records.append(record)
    if any(rows):
        tables = {name: choice.by_row(worth[name], rows) for name in CONTROLS}
        answers.rows.extend(
            {"set": benchmark.name, "scorer": scorer, "row": row, "questions": count}
            | {name: tables[name][row][0] for name in CONTROLS}
            for row, (_, count) in tables["score"].items()
        )
    answers.questions.extend(
        {
            "set": benchmark.name,
            "scorer": scorer,
            "key": question.key,
            "picture": str(question.picture),
            "row": question.row,
            "caption": question.caption,
            "foils": list(question.foils),
            "caption_score": float(caption[i]),
            "foil_scores": foils[i].tolist(),
            "caption_blind": float(blind_caption[i]),
            "foil_blind": blind_foils[i].tolist(),
            "correct": float(worth["score"][i]),
        }
        for i, question in enumerate(questions)
    )


def _numbers(
    questions: Sequence[Question], scores: TextScores[Picture]
) -> tuple[choice.Numbers, list[choice.Numbers], choice.Numbers, list[choice.Numbers]]:
    """Of captions and of their foils: scores, then blind scores."""
    return (
        np.array([scores.value[q.picture, q.caption] for q in questions]),
        [np.array([scores.value[q.picture, foil] for foil in q.foils]) for q in questions],
        np.array([scores.blind[q.caption] for q in questions]),
        [np.array([scores.blind[foil] for foil in q.foils]) for q in questions],
    )


def averages(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Over several sets, by scorer: micro, where all questions count alike (SugarCrepe's overall figure), and macro."""
    means = []
    for scorer in dict.fromkeys(record["scorer"] for record in records):
        own = [record for record in records if record["scorer"] == scorer]
        sizes = [record["questions"] for record in own]
        means.append(
            {"scorer": scorer, "sets": len(own), "questions": sum(sizes)}
            | {f"{name}_micro": float(np.average([r[name] for r in own], weights=sizes)) for name in CONTROLS}
            | {f"{name}_macro": float(np.mean([r[name] for r in own])) for name in CONTROLS}
        )
    return means


def write_answers(folder: Path, answers: Sequence[Answers], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Write the files named above, and return what `results.json` holds. facts: of the model and the run."""
    records = [record for each in answers for record in each.records]
    results = {**facts, "sets": records, "averages": averages(records) if len(answers) > 1 else []}
    with whole_folder(folder) as temporary:
        write_json(temporary / "results.json", results)
        pd.DataFrame([row for each in answers for row in each.rows]).to_parquet(temporary / "rows.parquet")
        pd.DataFrame([row for each in answers for row in each.questions]).to_parquet(temporary / "questions.parquet")
        for each in answers:
            if each.benchmark.shuffles:
                text = json.dumps(each.benchmark.shuffles, ensure_ascii=False, indent=1)
                (temporary / f"shuffles-{FILES[each.benchmark.name]}").write_text(text + "\n", encoding="utf-8")
        write_manifest(temporary, inputs=dict(facts), counts={r["set"]: r["questions"] for r in records})
    return results
