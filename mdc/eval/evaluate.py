"""What is said of a trained model, from its frozen features and its scores, in files for report and tracking.

metrics.json        numbers alone, nested, for comparison between runs
headline.json       the few of them that fit on a screen
probe.json          linear probes on the trained features and their floors
compositional.json  captions against foils, with the blind control
retrieval.json      pictures and their captions found among many, and classes told by their names
captions.json       what the model writes for test pictures, and how close it comes to their captions
neighbours.json     the nearest training pictures of test pictures
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from tqdm import tqdm

from mdc import dist
from mdc.config import CONTRASTIVE, EvaluateParams, Params
from mdc.data.shards import SAMPLES
from mdc.draws import derive_seed
from mdc.errors import UserError
from mdc.eval import compositional, retrieval
from mdc.eval.caption_scores import plain_words, score_written
from mdc.eval.captioning import written_captions
from mdc.eval.classification import classify
from mdc.eval.features import Features, Viewer, read_features
from mdc.eval.index import measure_recall
from mdc.files import MANIFEST, read_manifest, sha256, whole_folder, write_json, write_manifest
from mdc.generate.samplers import SAMPLERS
from mdc.objectives.scoring import MASKED, SCORERS, default_scorer
from mdc.train.checkpoint import LoadedModel, load_model

SPLITS = {
    "train": ("train",),
    "validation": ("validation",),
    "test": ("test",),
    "held-out": ("validation", "test"),
    "all": ("train", "validation", "test"),
}
DIGITS = 6  # of the numbers written: the last ones differ between machines
NEIGHBOURS = 6  # shown of each picture


def evaluate(params: Params, shards: Path, model: Path, features: Path, output: Path) -> None:
    """Probe, k-NN, pairs of caption and foil, captions and neighbours, written as the files above.

    A part that the data or the objective does not allow is left empty with a note. Raises UserError if the features
    are those of another model.
    """
    read_manifest(shards, made_by="shard")
    read_manifest(model, made_by="pretrain")
    device = dist.pick_device(params.compute.device)
    loaded = load_model(model, device)
    found = read_features(features)
    if found.fingerprint != loaded.fingerprint:
        raise UserError(
            f"{features} holds features of model {found.fingerprint}, {model} is model {loaded.fingerprint}; "
            "run `mdc stage extract`"
        )
    p = params.evaluate
    probe, classified = classify(p, found, device, label=params.download.label_column or "label")
    tokens = _Tokens(loaded, shards)
    pairs, compared = _compositional(p, found, loaded, tokens, shards, device, params.extract.batch_size)
    uids = choose_pictures(found, "test", p.pictures, p.seed)
    index = {"recall_at_10": measure_recall(found.index)}
    viewer = Viewer(loaded, shards, ("test",), device)
    scores, captioned = _caption_scores(p, found, loaded, viewer, params.extract.batch_size)
    found_by = _retrieval(p, found, loaded, viewer, tokens)
    metrics = {**classified, "compositional": compared, **captioned, **found_by, "index": index}
    parts = {
        "metrics": metrics,
        "headline": _headline(metrics),
        "probe": probe,
        "compositional": pairs,
        "retrieval": {"scorer": _retrieval_scorer(loaded), **found_by},
        "captions": {**_captions(p, found, loaded, viewer, uids), **scores},
        "neighbours": {"examples": [_neighbours(found, uid) for uid in uids]},
    }
    with whole_folder(output) as temporary:
        for name, part in parts.items():
            write_json(temporary / f"{name}.json", _rounded(part))
        inputs = {
            "shards": sha256(shards / MANIFEST),
            "model": sha256(model / MANIFEST),
            "features": sha256(features / MANIFEST),
            "params": p.model_dump(mode="json"),
        }
        counts = {"rows": len(found.samples), "pairs": sum(rule["pairs"] for rule in pairs["rules"])}
        notes = {name: part["note"] for name, part in parts.items() if "note" in part}
        write_manifest(temporary, inputs, counts, notes=notes, fingerprint=loaded.fingerprint)


def _headline(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The probe beside its floors, and the fair pairs beside their control: what `dvc metrics show` shows in a row."""
    pairs = metrics["compositional"].get(compositional.ALL, {})
    return {
        "probe": {
            name: {measure: row[measure] for measure in ("accuracy", "balanced_accuracy")}
            for name, row in metrics.get("probe", {}).items()
        },
        "pairs": {name: value for name, value in pairs.items() if name in (*SCORERS, "blind", "pmi")},
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return round(value, DIGITS) if isinstance(value, float) else value


# Captions against foils


def _compositional(
    p: EvaluateParams,
    found: Features,
    loaded: LoadedModel,
    tokens: Mapping[str, Sequence[int]],
    shards: Path,
    device: torch.device,
    batch_size: int,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`compositional.json`, and the part "compositional" of the metrics."""
    scorer = default_scorer(loaded.config.pretrain.objective)
    pairs, left_out = compositional.make_pairs(_samples(p, found), p.swaps, p.max_pairs, p.seed)
    facts = {
        "scorer": scorer,
        "draws": p.compositional_draws,
        "split": p.compositional_split,
        "left_out": left_out.__dict__,
    }
    if not pairs:
        note = "no pairs: no caption of the evaluated split becomes another caption by a swap of evaluate.swaps"
        return {**facts, "rules": [], "examples": [], "note": note}, {}
    viewer = Viewer(loaded, shards, SPLITS[p.compositional_split], device)
    both = [(pair.uid, text) for pair in pairs for text in (pair.caption, pair.foil)]
    wanted = len(set(both)) + len({text for _, text in both})
    with tqdm(total=wanted, desc="compositional", unit="caption") as progress:
        scores = compositional.score_pairs(
            pairs,
            compositional.Tokenised(loaded, tokens),
            viewer.patches,
            viewer.mean_patches(batch_size),
            scorer,
            p.compositional_draws,
            p.seed,
            progress.update,
        )
    rows = compositional.result_rows(pairs, scores, scorer)
    metrics = {row["rule"]: {key: value for key, value in row.items() if key != "rule"} for row in rows}
    rules = [row for row in rows if row["rule"] != compositional.ALL]
    shown = compositional.examples(pairs, scores, p.pictures, p.seed)
    return {**facts, "rules": rules, "examples": shown}, metrics


def _samples(p: EvaluateParams, found: Features) -> list[compositional.Sample]:
    evaluated = SPLITS[p.compositional_split]
    columns = (found.samples[name].tolist() for name in ("uid", "caption", "picture", "split"))
    return [
        compositional.Sample(uid, caption, picture, trained=split == "train", evaluated=split in evaluated)
        for uid, caption, picture, split in zip(*columns, strict=True)
    ]


# Pictures and texts among many


def _retrieval_scorer(loaded: LoadedModel) -> str:
    """Without draws: the number of scores grows with the square of the number of pictures."""
    objective = loaded.config.pretrain.objective
    return "heuristic" if objective in MASKED else default_scorer(objective)


def _retrieval(
    p: EvaluateParams, found: Features, loaded: LoadedModel, viewer: Viewer, tokens: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    """The parts "retrieval" and "zero_shot" of the metrics: of pictures of the test split, drawn by seed."""
    rows = found.samples[found.samples["split"] == "test"]
    order = sorted(range(len(rows)), key=lambda row: derive_seed(p.seed, "retrieval", rows["uid"].iloc[row]))
    rows = rows.iloc[order[: p.retrieval_pictures]]
    if rows.empty:
        return {}
    scorer, uids = _retrieval_scorer(loaded), rows["uid"].tolist()
    subject = compositional.Tokenised(loaded, tokens)
    own = rows["picture"].map(rows.groupby("picture")["caption"].agg(list))  # one picture may have several captions
    texts, right_MK = retrieval.belonging(own.tolist())
    labels, classes = rows["label"], sorted(set(found.samples["label"]) - {""})
    told = rows[labels != ""] if len(classes) > 1 else rows[:0]
    parts: dict[str, Any] = {}
    with tqdm(total=len(rows) + len(told), desc="retrieval", unit="image") as progress:
        scored = retrieval.score_matrix(
            subject, uids, viewer.patches, texts, scorer, p.compositional_draws, p.seed, progress.update
        )
        parts["retrieval"] = retrieval.retrieval(scored, right_MK)
        names = retrieval.zero_shot_texts(classes, p.zero_shot_templates)
        if len(told) and not any(subject.too_long(names)):
            scored = retrieval.score_matrix(
                subject,
                told["uid"].tolist(),
                viewer.patches,
                names,
                scorer,
                p.compositional_draws,
                p.seed,
                progress.update,
            )
            truth = np.array([classes.index(label) for label in told["label"]])
            parts["zero_shot"] = retrieval.zero_shot(scored, truth, len(p.zero_shot_templates))
    return parts


class _Tokens(dict[str, list[int]]):
    """Ids of captions: as they were stored, where they may have been cut to length, or made when they are asked for."""

    def __init__(self, loaded: LoadedModel, shards: Path) -> None:
        table = pq.read_table(shards / SAMPLES, columns=["caption", "tokens"])
        super().__init__(zip(table["caption"].to_pylist(), table["tokens"].to_pylist(), strict=True))
        self._tokenizer = loaded.tokenizer

    def __missing__(self, text: str) -> list[int]:
        self[text] = self._tokenizer.encode([text])[0]
        return self[text]


# Pictures to look at


def choose_pictures(found: Features, split: str, count: int, seed: int) -> list[str]:
    """Uids of `count` pictures of a split, drawn by seed: one class after the other, and no two of one group."""
    rows = found.samples[found.samples["split"] == split]
    rows = rows.assign(place=[derive_seed(seed, "pictures", uid) for uid in rows["uid"]]).sort_values("place")
    rows = rows.drop_duplicates(["label", "group"])
    return rows.assign(turn=rows.groupby("label").cumcount()).sort_values(["turn", "label"])["uid"].tolist()[:count]


def _captions(
    p: EvaluateParams, found: Features, loaded: LoadedModel, viewer: Viewer, uids: Sequence[str]
) -> dict[str, Any]:
    """`captions.json`, all but the scores."""
    if not uids:
        return {"examples": [], "note": "no captions: the test split is empty"}
    rows = found.samples.set_index("uid")
    known = Counter(word for caption in rows.loc[rows["split"] == "train", "caption"] for word in caption.split())
    with tqdm(total=len(uids), desc="captions", unit="caption") as progress:
        patches_MPD = viewer.patches(uids)
        captions = rows.loc[list(uids), "caption"].tolist()
        written = written_captions(loaded, patches_MPD, uids, captions, known, p.caption_length, p.seed)
        progress.update(len(uids))
    return written


def _caption_scores(
    p: EvaluateParams, found: Features, loaded: LoadedModel, viewer: Viewer, batch_size: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The part "scores" of `captions.json`, and the part "captioning" of the metrics; both empty if nothing is scored.

    The pictures are drawn by seed from the test split. One that occurs with several captions has several references.
    """
    objective = loaded.config.pretrain.objective
    rows = found.samples[found.samples["split"] == "test"]
    rows = rows[rows["caption"].map(plain_words) != ""]
    pictures = sorted(set(rows["picture"]), key=lambda picture: derive_seed(p.seed, "caption scores", picture))
    pictures = pictures[: p.metric_pictures]
    if not pictures or objective in CONTRASTIVE:
        return {}, {}
    of_picture = rows[rows["picture"].isin(pictures)].groupby("picture")
    uids, captions = of_picture["uid"].first(), of_picture["caption"].agg(list)
    references: list[list[str]] = captions.loc[pictures].tolist()
    wanted = 2 * len(pictures) * len(p.metric_lengths) * sum(objective in s.objectives for s in SAMPLERS.values())
    with tqdm(total=wanted, desc="caption scores", unit="caption") as progress:
        starts = range(0, len(pictures), batch_size)
        parts = [viewer.patches(uids.loc[pictures[i : i + batch_size]].tolist()) for i in starts]
        scored = score_written(loaded, torch.cat(parts), references, p.metric_lengths, p.seed, progress.update)
    metrics: dict[str, dict[str, Any]] = {}
    for row in scored:
        values = {name: value for name, value in row.items() if name not in ("sampler", "length")}
        metrics.setdefault(row["sampler"], {})[str(row["length"])] = values
    facts = {"pictures": len(pictures), "references": sum(map(len, references)), "rows": scored}
    return {"scores": facts}, {"captioning": metrics}


def _neighbours(found: Features, uid: str) -> dict[str, Any]:
    """The nearest training pictures of a picture, nearest first."""
    rows = found.samples
    by_uid = rows.set_index("uid")
    own = int(np.flatnonzero(rows["uid"] == uid)[0])
    k, wanted = 4 * NEIGHBOURS, min(NEIGHBOURS, int((rows["split"] == "train").sum()))
    while True:
        similarities, near = found.index.search(found.arrays["model"][own : own + 1], k, found.index.facts.model)
        shown = by_uid.loc[near[0]].assign(similarity=similarities[0]).reset_index()
        trained = shown[shown["split"] == "train"]
        if len(trained) >= wanted:
            columns = ["uid", "caption", "similarity"]
            neighbours = trained[columns].head(NEIGHBOURS).to_dict("records")
            return {"uid": uid, "caption": rows["caption"].iloc[own], "neighbours": neighbours}
        k *= 4
