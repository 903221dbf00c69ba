"""The report: one HTML page that shows a run's results and how they came about, from the files of its stages.

The page holds its style, figures and pictures itself, needs no script and fetches nothing. Captions come from the web:
the template escapes every text.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from mdc.config import CONTRASTIVE, Params, PretrainParams, Section, pairs_in_share
from mdc.data.tokenizer import MASK
from mdc.files import MANIFEST, fingerprint, read_manifest, sha256, whole_folder, write_manifest
from mdc.report import figures, words
from mdc.report.data_tables import duplicate_sentence
from mdc.report.figures import Dots
from mdc.report.run import SPLITS, Run, read_run
from mdc.report.tables import (
    CHANCE,
    FOIL_TRAINED,
    Cell,
    Interval,
    Table,
    caption_table,
    class_table,
    compositional_rows,
    compositional_table,
    count,
    percent,
    probe_interval,
    probe_table,
    retrieval_table,
    rule_name,
    wilson,
)

PAGE = "report.html"
SETTINGS = ("download", "caption", "shard", "pretrain", "extract", "evaluate", "report")  # sections that shape results
CAPTION_STAGE = ("ok", "dropped:missing_caption")  # statuses whose rows the caption stage counts
FOILS = 9  # pairs of caption and foil that are shown


@dataclass(frozen=True)
class Tile:
    """A number at the head of the page, never without what it is to be compared with."""

    name: str
    value: str
    unit: str
    beside: str


@dataclass(frozen=True)
class Step:
    """What one stage of the flow made."""

    stage: str
    amount: str
    detail: str


@dataclass(frozen=True)
class Word:
    """A word, or several, of a caption; changed: not in the caption that it is compared with."""

    text: str
    changed: bool


def write_report(
    params: Params,
    downloaded: Path,
    captions: Path,
    shards: Path,
    model: Path,
    features: Path,
    evaluation: Path,
    output: Path,
) -> None:
    """Write `report.html` and the stage's manifest into the folder `output`.

    The bytes depend on the files read and on the parameters alone.
    """
    stages = {
        "download": downloaded,
        "caption": captions,
        "shard": shards,
        "pretrain": model,
        "extract": features,
        "evaluate": evaluation,
    }
    for name, folder in stages.items():
        read_manifest(folder, made_by=name)
    run = read_run(params, downloaded, captions, shards, model, features, evaluation)
    html = render(run)
    inputs = {name: sha256(folder / MANIFEST) for name, folder in stages.items()}
    inputs["params"] = fingerprint({name: getattr(params, name).model_dump() for name in SETTINGS})
    with whole_folder(output) as temporary:
        (temporary / PAGE).write_text(html, encoding="utf-8")
        write_manifest(temporary, inputs, {"pictures": html.count("<img ")})


def render(run: Run) -> str:
    """The page as HTML."""
    loader = PackageLoader("mdc.report", ".")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["signed"] = lambda number: f"{number:+.2f}".replace("-", "−")
    style = resources.files("mdc.report").joinpath("report.css").read_text(encoding="utf-8")
    return environment.get_template("report.html").render(
        title=run.params.report.title,
        style=Markup(style),  # ours, not the data's
        lead=_lead(run),
        tiles=_tiles(run),
        verdicts=_verdicts(run),
        probe=_probe(run),
        compositional=_compositional(run),
        flow=_flow(run),
        dropped=_dropped(run),
        hosts=_hosts(run),
        sides=_sides(run),
        duplicates=duplicate_sentence(run.stats),
        stored_size=_stored_size(run),
        pairs=_pairs(run),
        training=_training(run),
        loss_figure=_loss_figure(run),
        loss_note=words.loss_note(run.config.pretrain.objective),
        length_figure=_length_figure(run),
        length_note=_length_note(run),
        classes=class_table(run.probe) if run.probe else None,
        written=_written(run),
        notes={name: words.sentence(note) for name, note in run.notes.items()},
        neighbours=_neighbours(run),
        facts=_facts(run),
        settings=_settings(run),
        credit=run.params.report.credit,
    )


# The head


def _lead(run: Run) -> str:
    seen = count(_trained_on(run))
    how = words.OBJECTIVES[run.config.pretrain.objective]
    return f"An image encoder that learnt to see from {seen} pictures, {how}. No class was ever shown to it."


def _tiles(run: Run) -> list[Tile]:
    tiles = []
    if run.probe:
        model, floor, name = _probe_against_floor(run.probe)
        beside = f"balanced accuracy; the best floor, {name}, reaches {percent(floor.mean)}"
        tiles.append(Tile("Linear probe", percent(model.mean), "%", beside))
    if run.compositional:
        pairs, seen, blind = _all_pairs(run)
        beside = f"of {count(pairs)} pairs; {percent(blind.mean)} without the picture, {percent(CHANCE)} by chance"
        tiles.append(Tile("Caption over foil", percent(seen.mean), "%", beside))
    seen_in = f"parameters; {count(_images_seen(run))} pictures seen in {count(run.config.pretrain.steps)} updates"
    return [*tiles, Tile("Model", _short(sum(run.parameters.values())), "", seen_in)]


def _short(number: int) -> str:
    """A number to two or three digits: 1.4 million."""
    for size, name in ((10**9, "billion"), (10**6, "million"), (10**3, "thousand")):
        if number >= size:
            return f"{number / size:.{0 if number >= 100 * size else 1}f} {name}"
    return str(number)


def _trained_on(run: Run) -> int:
    """Pictures of the training split that the model learnt from."""
    return pairs_in_share(run.splits["train"], run.config.pretrain.data_share)


def _images_seen(run: Run) -> int:
    return int(run.losses.images.iloc[-1])


# Results


def _probe_against_floor(probe: Mapping[str, Any]) -> tuple[Interval, Interval, str]:
    """The trained encoder's balanced accuracy, the best floor's, and that floor's name."""
    model, *floors = sorted(probe["rows"], key=lambda row: row["features"] != "model")
    best = max(floors, key=lambda row: row["balanced_accuracy_mean"])
    name = words.within(best["name"])
    return probe_interval(model, "balanced_accuracy"), probe_interval(best, "balanced_accuracy"), name


def _all_pairs(run: Run) -> tuple[int, Interval, Interval]:
    """The number of pairs in the first row, the share won with the picture, and the share won without it."""
    assert run.compositional
    row = compositional_rows(run.compositional, run.metrics)[0]
    seen, blind = (wilson(row[key], row["pairs"]) for key in (run.compositional["scorer"], "blind"))
    return row["pairs"], seen, blind


def _verdicts(run: Run) -> list[str]:
    verdicts = []
    if run.probe:
        model, floor, name = _probe_against_floor(run.probe)
        verdicts.append(
            f"A linear layer on the frozen features names the {run.probe['label']} of a test picture with a balanced "
            f"accuracy of {percent(model.mean)} %, against {percent(floor.mean)} % on {name}, the best floor. "
            f"{lead_over_floors(run.probe['margins'])}"
        )
    if run.compositional:
        pairs, seen, blind = _all_pairs(run)
        verdicts.append(
            f"Between a caption and the same with a word swapped, the model prefers the true one in "
            f"{percent(seen.mean)} % of {count(pairs)} pairs, against {percent(blind.mean)} % when it cannot see the "
            f"picture: {compared(seen, blind)}."
        )
    return verdicts or ["This run has neither classes to probe nor captions to compare, so there is no score yet."]


def lead_over_floors(margins: Sequence[Mapping[str, Any]]) -> str:
    """What may be said of the smallest lead in balanced accuracy, given its interval over test pictures."""
    if not margins:
        return "Without the untrained encoder and raw pixels beside it, this does not show what training gave."
    least = min(margins, key=lambda margin: margin["balanced_accuracy"])
    interval = f"95 % interval over test pictures {_lead_of(least, '_low')} to {_lead_of(least, '_high')}"
    lead = f"Its smallest lead, {words.floor(least['over'])}, is {_lead_of(least)} points ({interval})"
    if least["balanced_accuracy_low"] > 0:
        return f"{lead}: training on captions helped."
    if least["balanced_accuracy_high"] < 0:
        return f"{lead}: training on captions did not help here."
    return f"{lead}, so this run alone does not prove a gain."


def _lead_of(margin: Mapping[str, Any], end: str = "") -> str:
    """A lead in balanced accuracy, in points, or an end of its interval."""
    return percent(margin[f"balanced_accuracy{end}"]).replace("-", "−")


def compared(value: Interval, control: Interval) -> str:
    """What may be said of a number beside its control."""
    gain = value.mean - control.mean
    if percent(abs(gain)) == percent(0):
        return "no difference, so this run does not show that the picture helps"
    if gain < 0:
        return f"{percent(-gain)} points less, so this run does not show that the picture helps"
    if value.low <= control.high:
        return f"{percent(gain)} points more, but the 95 % intervals meet, so this run alone proves no gain"
    return f"{percent(gain)} points more, owed to the picture, and the 95 % intervals do not meet"


def _probe(run: Run) -> dict[str, Any] | None:
    if not run.probe:
        return None
    probe, rows = run.probe, run.probe["rows"]
    dots = [
        Dots(
            name=row["name"],
            values=(probe_interval(row, "balanced_accuracy"), probe_interval(row, "accuracy")),
            strong=row["features"] == "model",
        )
        for row in rows
    ]
    read = "; ".join(f"{dot.name}: {percent(dot.values[0].mean)} % balanced" for dot in dots)
    return {
        "label": probe["label"],
        "table": probe_table(probe, run.metrics),
        "figure": figures.probe_figure(dots, ("balanced accuracy", "accuracy"), f"Linear probe accuracy. {read}."),
        "seeds": run.params.evaluate.probe_seeds,
        "notes": _probe_notes(probe),
    }


def _probe_notes(probe: Mapping[str, Any]) -> str:
    """The protocol's sizes, and what a reader should doubt."""
    notes = [
        f"{count(probe['train'])} training pictures, of which {count(probe['holdout'])} were held out to choose the "
        f"learning rate and the weight decay; {count(probe['test'])} test pictures, used once."
    ]
    leads = [
        f"{words.floor(m['over'])} by {_lead_of(m)} points ({_lead_of(m, '_low')} to {_lead_of(m, '_high')})"
        for m in probe["margins"]
    ]
    if leads:
        notes.append(f"Lead in balanced accuracy, with its 95 % interval over test pictures: {'; '.join(leads)}.")
    edge = [row["name"] for row in probe["rows"] if row.get("grid_edge")]
    if edge:
        notes.append(f"The chosen values lie at the edge of the grid for: {', '.join(edge)}.")
    unfinished = [row["name"] for row in probe["rows"] if row.get("converged") is False]
    if unfinished:
        notes.append(f"Not fully converged: {', '.join(unfinished)}.")
    return " ".join(notes)


def _compositional(run: Run) -> dict[str, Any] | None:
    if not run.compositional:
        return None
    scorer = run.compositional["scorer"]
    rows = compositional_rows(run.compositional, run.metrics)
    dots = [
        Dots(
            name=rule_name(row["rule"]),
            values=tuple(wilson(row[kind], row["pairs"]) for kind in (scorer, "blind", "pmi")),
        )
        for row in rows
    ]
    read = "; ".join(
        f"{dot.name}: {percent(dot.values[0].mean)} % with the picture, {percent(dot.values[1].mean)} % without"
        for dot in dots
    )
    return {
        "table": compositional_table(run.compositional, run.metrics),
        "retrieval": retrieval_table(run.metrics) if "retrieval" in run.metrics else None,
        "figure": figures.compositional_figure(dots, CHANCE, f"Captions that outscore their foils. {read}."),
        "scorer": f"Score: {words.score(scorer, run.compositional['draws'])}.",
        "split": words.SPLITS[run.params.evaluate.compositional_split],
        "unfair": any(FOIL_TRAINED in row["rule"] for row in rows),
        "examples": [_foil(run, example) for example in _one_of_each(run.compositional["examples"])],
    }


def _one_of_each(examples: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The first examples of every rule in turn, whatever their scores."""
    seen: dict[str, int] = {}
    turns = []
    for place, example in enumerate(examples):
        turns.append((seen.get(example["rule"], 0), place))
        seen[example["rule"]] = seen.get(example["rule"], 0) + 1
    return [examples[place] for _, place in sorted(turns)[:FOILS]]


def _foil(run: Run, example: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "picture": run.pictures[example["uid"]],
        "rule": rule_name(example["rule"]),
        "caption": marked(example["caption"], example["foil"]),
        "foil": marked(example["foil"], example["caption"]),
        "difference": example["score_caption"] - example["score_foil"],
        "blind": example["blind_caption"] - example["blind_foil"],
    }


def marked(text: str, other: str) -> list[Word]:
    """The words of `text`, those marked that `other` lacks at their place."""
    mine, theirs = text.split(), other.split()
    changes = SequenceMatcher(None, theirs, mine, autojunk=False).get_opcodes()
    return [
        Word(" ".join(mine[first:last]), changed=kind != "equal") for kind, _, _, first, last in changes if last > first
    ]


# From a list to a model


def _flow(run: Run) -> list[Step]:
    pretrain, rows_width = run.config.pretrain, run.features
    splits = ", ".join(f"{count(run.splits[split])} {split}" for split in SPLITS)
    return [
        Step(
            "download", count(run.statuses.get("ok", 0)), f"pictures from a list of {count(sum(run.statuses.values()))}"
        ),
        Step(
            "caption",
            count(len(run.kept_lengths)),
            f"captions kept, in a vocabulary of {count(run.config.vocabulary.size)}",
        ),
        Step("shard", count(sum(run.splits.values())), f"pairs: {splits}"),
        Step(
            "pretrain",
            count(_images_seen(run)),
            f"pictures seen in {count(pretrain.steps)} updates of {count(pretrain.batch_size)}",
        ),
        Step("extract", count(rows_width[0]), f"features of {count(rows_width[1])} numbers"),
        Step("evaluate", count(run.splits["test"]), "test pictures, kept apart until here"),
        Step("report", "1", "page: this one"),
    ]


def _dropped(run: Run) -> Table:
    """Pairs that were lost, by stage and reason, the most frequent first."""
    lost = [("download", reason, n) for reason, n in run.statuses.items() if reason not in CAPTION_STAGE]
    lost += [("caption", reason, n) for reason, n in run.dropped.items()]
    listed = sum(run.statuses.values())
    return Table(
        caption="Pairs of the list that did not reach the shards.",
        columns=("Stage and reason", "Pairs", "% of the list"),
        rows=tuple(
            (Cell(f"{stage}: {words.reason(reason)}"), Cell(count(n)), Cell(percent(n / listed)))
            for stage, reason, n in lost
        ),
    )


def _hosts(run: Run) -> Markup:
    rows = [(host.name or "the sample", host.listed) for host in run.stats.hosts]
    description = f"Rows of the list by host, the {count(len(rows))} with the most of {count(run.stats.host_count)}."
    return figures.bar_figure("hosts", rows, "rows of the list", description)


def _sides(run: Run) -> Markup | None:
    rows = [(f"{count(side)}–{count(2 * side - 1)}", number) for side, number in run.stats.sides.items()]
    if not rows:
        return None
    return figures.bar_figure("sides", rows, "pictures", "Pictures by their shorter side as it came, in pixels.")


# The pairs


def _stored_size(run: Run) -> str:
    return f"{run.params.download.image_size} pixels on the shorter side"


def _pairs(run: Run) -> list[dict[str, Any]]:
    vocabulary = run.config.vocabulary
    special = {vocabulary.bos_id, vocabulary.eos_id, vocabulary.mask_id, vocabulary.pad_id, vocabulary.unk_id}
    pictures = [run.pictures[uid] for uid in run.first_pairs]
    return [
        {
            "picture": picture,
            "tokens": [
                {"text": text, "special": token in special}
                for text, token in zip(run.tokenizer.tokens(picture.tokens), picture.tokens, strict=True)
            ],
        }
        for picture in pictures
    ]


# Training


def _training(run: Run) -> list[str]:
    pretrain, seen = run.config.pretrain, _images_seen(run)
    loss, validation = _last_losses(run)
    return [
        f"The model has {_short(sum(run.parameters.values()))} parameters, {_short(run.parameters['encoder'])} of them "
        f"in the encoder. It learnt "
        f"{words.OBJECTIVES[pretrain.objective]}.",
        f"In {count(pretrain.steps)} updates of {count(pretrain.batch_size)} pictures it saw each of the "
        f"{count(_trained_on(run))} training pictures {seen / _trained_on(run):.1f} times on average. "
        f"The loss ended at {loss:.2f} in training and at {validation:.2f} on the validation split.",
    ]


def _last_losses(run: Run) -> tuple[float, float]:
    train, validation = (run.losses[name].dropna().iloc[-1] for name in ("train_loss", "validation_loss"))
    return float(train), float(validation)


def _loss_figure(run: Run) -> Markup:
    train, validation = _last_losses(run)
    description = f"Loss against pictures seen. At the end: {train:.2f} in training, {validation:.2f} in validation."
    return figures.loss_figure(run.losses, words.loss_unit(run.config.pretrain.objective), description)


def _length_figure(run: Run) -> Markup:
    median = int(np.median(run.kept_lengths))
    description = f"Captions by their length. The median of the kept ones is {median} tokens."
    return figures.length_figure(run.kept_lengths, run.dropped_lengths, description)


def _length_note(run: Run) -> str:
    caption = run.params.caption
    return f"Lengths of captions. Kept are those of {caption.min_tokens} to {caption.max_tokens} tokens."


# Captions, neighbours


def _written(run: Run) -> dict[str, Any] | None:
    if not run.written:
        return None
    unmasking, examples = run.written.get("unmasking"), run.written["examples"]
    first = examples[0]
    return {
        "picture": run.pictures[unmasking["uid"]] if unmasking else None,
        "steps": unmasked(unmasking["steps"], {MASK, *run.tokenizer.tokens([run.config.vocabulary.mask_id])})
        if unmasking
        else [],
        "note": f"Test pictures that training never showed. Written at a length of {first['length']} tokens by "
        f"{words.SAMPLERS[first['sampler']]}; the true caption is for comparison alone.",
        "examples": [{"picture": run.pictures[e["uid"]], "generated": e["generated"]} for e in examples],
        "scores": caption_table(run.written["scores"]) if "scores" in run.written else None,
        "filled": [
            {
                "picture": run.pictures[e["uid"]],
                "parts": e["template"].split(MASK),
                "text": marked(e["text"], e["template"]),
            }
            for e in run.written.get("filled", [])
        ],
    }


def unmasked(steps: Sequence[Sequence[str]], masks: set[str]) -> list[list[dict[str, str]]]:
    """Per step and position the token and its state: `mask`, `new` (unmasked in this step) or `old`.

    steps: the tokens after each step, the start first.
    """
    before = [steps[0], *steps[:-1]]
    return [
        [
            {"text": token, "state": "mask" if token in masks else "new" if earlier in masks else "old"}
            for token, earlier in zip(step, previous, strict=True)
        ]
        for step, previous in zip(steps, before, strict=True)
    ]


def _neighbours(run: Run) -> list[dict[str, Any]]:
    return [
        {
            "picture": run.pictures[example["uid"]],
            "near": [
                {"picture": run.pictures[near["uid"]], "similarity": near["similarity"]}
                for near in example["neighbours"]
            ],
        }
        for example in (run.neighbours or {}).get("examples", [])
    ]


# Settings


def _facts(run: Run) -> list[tuple[str, str]]:
    pretrain = run.config.pretrain
    parts = ", ".join(f"{name} {count(size)}" for name, size in run.parameters.items())
    return [
        ("Data version", run.version),
        ("Objective", pretrain.objective),
        ("Encoder", f"{pretrain.encoder}, {pretrain.image_size} × {pretrain.image_size} pixels"),
        (
            "Text tower" if pretrain.objective in CONTRASTIVE else "Decoder",
            f"{pretrain.decoder_depth} layers of width {pretrain.decoder_width}",
        ),
        ("Parameters", f"{count(sum(run.parameters.values()))} ({parts})"),
        ("Vocabulary", f"{count(run.config.vocabulary.size)} tokens"),
    ]


def _settings(run: Run) -> list[tuple[str, list[dict[str, Any]]]]:
    """Every parameter that shapes the result, by section; changed: not the default, nor the preset's value."""
    return [(name, _setting_rows(getattr(run.params, name))) for name in SETTINGS]


def _setting_rows(section: Section) -> list[dict[str, Any]]:
    start = {"preset": section.preset} if isinstance(section, PretrainParams) else {}
    usual = type(section).model_validate(start).model_dump()
    return [
        {"name": name, "value": _shown(value), "changed": value != usual[name]}
        for name, value in section.model_dump().items()
    ]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
