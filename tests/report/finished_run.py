"""A finished run in small: named shapes through the real caption and shard stages, and made-up scores."""

import hashlib
import io
from collections import Counter
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw
from safetensors.numpy import save_file

from mdc.config import ModelConfig, Params
from mdc.data.captions import prepare_captions
from mdc.data.packing import write_shards
from mdc.data.tars import FixedTar
from mdc.data.tokenizer import CaptionTokenizer
from mdc.files import read_json, write_json, write_manifest
from mdc.report.page import write_report

COLOURS = ("red", "blue", "green", "orange", "purple", "black")
SHAPES = ("circle", "square", "bar", "frame")
SIZES = ("large", "small", "tiny")
HOSTILE = '<script>alert("x")</script> & <img src="https://evil.example/x.png" onerror=alert(1)>'


@dataclass(frozen=True)
class Pair:
    """A row of the list."""

    uid: str
    caption: str
    label: str
    picture: bytes


def shapes(image_format: str = "png") -> list[Pair]:
    """72 drawings named by size, colour and shape; the shape is the class."""
    return [
        Pair(f"{size}-{colour}-{shape}", f"{size} {colour} {shape}", shape, draw(size, colour, shape, image_format))
        for size, colour, shape in product(SIZES, COLOURS, SHAPES)
    ]


def draw(size: str, colour: str, shape: str, image_format: str = "png") -> bytes:
    image = Image.new("RGB", (40, 40), "white")
    pen = ImageDraw.Draw(image)
    half = {"large": 18, "small": 12, "tiny": 7}[size]
    box = (20 - half, 20 - half, 20 + half, 20 + half)
    if shape == "circle":
        pen.ellipse(box, fill=colour)
    elif shape == "square":
        pen.rectangle(box, fill=colour)
    elif shape == "bar":
        pen.rectangle((20 - half, 16, 20 + half, 24), fill=colour)
    else:
        pen.rectangle(box, outline=colour, width=4)
    buffer = io.BytesIO()
    image.save(buffer, image_format)
    return buffer.getvalue()


class World:
    """The folders of a run under `root`, and its report."""

    def __init__(self, root: Path, pairs: list[Pair], changes: dict[str, Any] | None = None) -> None:
        self.root = root
        self.pairs = pairs
        base = {
            "caption": {"max_tokens": 8, "validation_share": 0.2, "test_share": 0.2, "alike_bits": -1},
            "evaluate": {"caption_length": 6, "probe_seeds": 3},
            "download": {"image_format": "png"},
            "report": {"title": "A test run", "sample_pairs": 6, "credit": "Shapes by the tests, CC0"},
        }
        for section, values in (changes or {}).items():
            base[section] = {**base.get(section, {}), **values}
        self.params = Params.model_validate(base)
        self.folders = {
            name: root / name
            for name in ("downloaded", "captions", "shards", "model", "features", "evaluation", "report")
        }
        write_downloaded(self["downloaded"], pairs)
        prepare_captions(self.params.caption, self["downloaded"], self["captions"])
        write_shards(self.params.shard, self["downloaded"], self["captions"], self["shards"])
        self.samples = pq.read_table(self["shards"] / "samples.parquet").to_pylist()
        write_model(self["model"], self.params, CaptionTokenizer.load(self["shards"] / "tokenizer.json"))
        write_features(self["features"], len(self.samples))
        write_evaluation(self["evaluation"], self.samples)

    def __getitem__(self, name: str) -> Path:
        return self.folders[name]

    def evaluation(self, name: str) -> Any:
        return read_json(self["evaluation"] / f"{name}.json")

    def change(self, name: str, **values: Any) -> None:
        """Put values over those of a JSON file of the evaluation."""
        write_json(self["evaluation"] / f"{name}.json", {**self.evaluation(name), **values})

    def report(self, output: Path | None = None) -> str:
        """Write the report and return its HTML."""
        output = output or self["report"]
        inputs = {name: folder for name, folder in self.folders.items() if name != "report"}
        write_report(self.params, **inputs, output=output)
        return (output / "report.html").read_text(encoding="utf-8")


def write_downloaded(folder: Path, pairs: list[Pair], extension: str = "png") -> None:
    """As the download stage leaves it, with a refused connection and a picture too large in the list as well."""
    folder.mkdir(parents=True)
    with (folder / "00000.tar").open("wb") as file:
        tar = FixedTar(file)
        for pair in sorted(pairs, key=lambda pair: pair.uid):
            tar.add(f"{pair.uid}.{extension}", pair.picture)
        tar.close()
    lost = [("lost-1", "failed:http_404"), ("lost-2", "failed:http_404"), ("lost-3", "failed:too_large")]
    rows = [
        {
            "uid": pair.uid,
            "caption": pair.caption,
            "label": pair.label,
            "group": pair.uid,
            "status": "ok",
            "sha256": hashlib.sha256(pair.picture).hexdigest(),
        }
        for pair in pairs
    ]
    rows += [
        {"uid": uid, "caption": "a lost one", "label": "", "group": uid, "status": s, "sha256": None} for uid, s in lost
    ]
    rows.append(
        {
            "uid": "mute",
            "caption": None,
            "label": "",
            "group": "mute",
            "status": "dropped:missing_caption",
            "sha256": None,
        }
    )
    rows = [{**row, "url": f"http://pictures.test/{row['uid']}"} for row in rows]
    pq.write_table(pa.Table.from_pylist(rows), folder / "00000.parquet")
    write_manifest(folder, {}, {"rows": len(rows)})


def write_model(folder: Path, params: Params, tokenizer: CaptionTokenizer) -> None:
    folder.mkdir()
    config = ModelConfig(
        pretrain=params.pretrain, vocabulary=tokenizer.vocabulary, max_tokens=params.caption.max_tokens
    )
    (folder / "config.json").write_text(config.model_dump_json(), encoding="utf-8")
    weights = {"encoder.patch": np.zeros((100, 9)), "encoder.norm": np.zeros(100), "decoder.embed": np.zeros((50, 10))}
    save_file({name: array.astype(np.float32) for name, array in weights.items()}, folder / "model.safetensors")
    lines = ["step,images,train_loss,validation_loss,lr"]
    for step in range(20, 1501, 20):
        noise = 0.15 * np.sin(step * 12.9898)
        validation = f"{1.9 + 4 * np.exp(-step / 250):.4f}" if step % 250 == 0 or step == 1500 else ""
        lines.append(f"{step},{step * 128},{1.6 + 5 * np.exp(-step / 220) + noise:.4f},{validation},0.001")
    (folder / "loss.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    write_manifest(folder, {}, {})


def write_features(folder: Path, rows: int) -> None:
    folder.mkdir()
    np.save(folder / "model.npy", np.zeros((rows, 128), np.float16))
    write_manifest(folder, {}, {})


def probe_row(
    features: str, name: str, balanced: float, plain: float, reach: float, classes: list[str]
) -> dict[str, Any]:
    """A row of probe.json; the majority class, whose reach is 0, has no recalls and no settings."""
    row: dict[str, Any] = {"features": features, "name": name}
    for metric, mean in (("balanced_accuracy", balanced), ("accuracy", plain)):
        row[metric] = [mean - reach / 2, mean, mean + reach / 2]
        row |= {f"{metric}_mean": mean, f"{metric}_low": mean - reach, f"{metric}_high": mean + reach}
    if not reach:
        return row
    recalls = {name: balanced + 0.01 * place for place, name in enumerate(classes)}
    return row | {"recall_by_class": recalls, "grid_edge": features == "pixels", "converged": True}


def caption_row(sampler: str, length: int) -> dict[str, Any]:
    scores = {"bleu_1": 0.412, "bleu_2": 0.303, "bleu_3": 0.2, "bleu_4": 0.1, "rouge_l": 0.456, "cider": 1.234}
    blind = {name: value / 10 for name, value in scores.items()}
    return {"sampler": sampler, "length": length, **scores, "blind": blind}


def write_evaluation(folder: Path, samples: list[dict[str, Any]]) -> None:
    folder.mkdir()
    test = [sample for sample in samples if sample["split"] == "test"]
    counts, test_counts = (
        dict(Counter(sample["label"] for sample in samples if sample["label"] and sample["split"] == split))
        for split in ("train", "test")
    )
    classes = sorted(counts)
    rows = [
        probe_row("model", "Trained encoder", 0.712, 0.803, 0.01, classes),
        probe_row("untrained", "Untrained encoder", 0.487, 0.691, 0.01, classes),
        probe_row("pixels", "Raw pixels", 0.452, 0.702, 0.004, classes),
        probe_row("majority", "Most frequent class", 0.25, 0.31, 0.0, classes),
    ]
    margins = [
        {
            "over": "untrained",
            "balanced_accuracy": 0.112,
            "balanced_accuracy_low": 0.071,
            "balanced_accuracy_high": 0.153,
        },
        {"over": "pixels", "balanced_accuracy": 0.101, "balanced_accuracy_low": 0.052, "balanced_accuracy_high": 0.149},
    ]
    write_json(
        folder / "probe.json",
        {
            "label": "shape",
            "classes": classes,
            "train": sum(counts.values()),
            "holdout": 9,
            "test": sum(test_counts.values()),
            "class_counts": counts,
            "test_class_counts": test_counts,
            "margins": margins,
            "rows": rows,
        },
    )
    rules = [
        {"rule": "colour", "pairs": 120, "mc": 0.85, "blind": 0.51, "pmi": 0.875, "ties": 1, "mean_stderr": 0.2},
        {"rule": "size", "pairs": 40, "mc": 0.75, "blind": 0.5, "pmi": 0.8, "ties": 0, "mean_stderr": 0.3},
        {
            "rule": "shape (foil trained on)",
            "pairs": 24,
            "mc": 0.5,
            "blind": 0.25,
            "pmi": 0.75,
            "ties": 0,
            "mean_stderr": 0.3,
        },
    ]
    examples = [
        {
            "uid": sample["uid"],
            "caption": sample["caption"],
            "foil": f"{sample['caption'].split()[0]} pink {sample['caption'].split()[-1]}",
            "rule": "colour" if place % 2 else "size",
            "score_caption": -4.25 - place,
            "score_foil": -6.5 + place,
            "stderr": 0.2,
            "blind_caption": -7.0,
            "blind_foil": -6.75,
        }
        for place, sample in enumerate(test[:8])
    ]
    write_json(folder / "compositional.json", {"scorer": "mc", "draws": 32, "rules": rules, "examples": examples})
    steps = [
        ["[MASK]", "[MASK]", "[MASK]", "[MASK]"],
        ["[MASK]", "[MASK]", "circle", "[MASK]"],
        ["[MASK]", "red", "circle", "[MASK]"],
        ["[MASK]", "red", "circle", "[EOS]"],
        ["large", "red", "circle", "[EOS]"],
    ]
    write_json(
        folder / "captions.json",
        {
            "examples": [
                {
                    "uid": s["uid"],
                    "caption": s["caption"],
                    "generated": "large red circle",
                    "sampler": "confidence",
                    "length": 6,
                }
                for s in test[:6]
            ],
            "scores": {
                "pictures": 14,
                "references": 15,
                "rows": [caption_row("confidence", 4), caption_row("ancestral", 6)],
            },
            "unmasking": {"uid": test[0]["uid"], "caption": test[0]["caption"], "steps": steps},
            "filled": [
                {"uid": s["uid"], "template": "large [MASK] [MASK]", "text": "large red circle"} for s in test[:3]
            ],
        },
    )
    write_json(
        folder / "neighbours.json",
        {
            "examples": [
                {
                    "uid": s["uid"],
                    "caption": s["caption"],
                    "neighbours": [
                        {"uid": near["uid"], "caption": near["caption"], "similarity": 0.98 - 0.03 * place}
                        for place, near in enumerate(samples[5 * number : 5 * number + 5])
                    ],
                }
                for number, s in enumerate(test[:4])
            ]
        },
    )
    knn = {
        name: {"10": {"accuracy": 0.7, "balanced_accuracy": 0.6}, "20": {"accuracy": 0.71, "balanced_accuracy": 0.62}}
        for name in ("model", "untrained", "pixels")
    }
    write_json(
        folder / "metrics.json",
        {
            "probe": {"model": {"accuracy": 0.803, "balanced_accuracy": 0.712}},
            "knn": knn,
            "compositional": {"all": {"mc": 0.825, "blind": 0.5075, "pmi": 0.85625, "pairs": 160, "ties": 1}},
            "retrieval": {
                "pictures": 60,
                "texts": 58,
                "picture_to_text": {
                    "score": {"recall_at_1": 0.312, "recall_at_5": 0.61, "recall_at_10": 0.75},
                    "pmi": {"recall_at_1": 0.414, "recall_at_5": 0.72, "recall_at_10": 0.85},
                    "chance": {"recall_at_1": 0.0172, "recall_at_5": 0.0862, "recall_at_10": 0.1724},
                },
                "text_to_picture": {
                    "score": {"recall_at_1": 0.4, "recall_at_5": 0.7, "recall_at_10": 0.8},
                    "chance": {"recall_at_1": 0.0167, "recall_at_5": 0.0833, "recall_at_10": 0.1667},
                },
            },
            "zero_shot": {
                "pictures": 60,
                "classes": 9,
                "templates": 1,
                "chance": 1 / 9,
                "score": {"top_1": 0.2, "top_5": 0.6, "balanced": 0.15},
                "pmi": {"top_1": 0.25, "top_5": 0.65, "balanced": 0.2},
                "blind": {"top_1": 0.1, "top_5": 0.5, "balanced": 0.1111},
            },
            "index": {"recall_at_10": 1.0},
        },
    )
    write_manifest(folder, {}, {})
