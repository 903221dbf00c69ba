"""What `mdc probe`, `retrieve`, `zeroshot` and `caption --references` do with a model as `mdc.load` opens it."""

import base64
import html
import io
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from mdc import dist
from mdc.config import EvaluateParams
from mdc.errors import UserError
from mdc.eval import retrieval
from mdc.eval.caption_scores import score_written
from mdc.eval.frozen import Encode, frozen_features, pixels
from mdc.eval.labelled import Labelled
from mdc.eval.measures import UNKNOWN
from mdc.eval.probing import Frozen, attend_encoder, passes, probe_encoder, warnings
from mdc.eval.references import Referenced
from mdc.files import whole_folder, write_json, write_manifest
from mdc.train.checkpoint import LoadedModel

log = logging.getLogger(__name__)

PIXEL_SIZE = 16  # side of the pictures whose raw pixels are a floor
SHOWN = 24  # pictures on the page of captions
THUMBNAIL = 192  # pixels


@dataclass(frozen=True)
class Encoder:
    """A set of features to probe: by pooling, how pictures become rows, with a mark of weights and transform.

    patches: the same without pooling, where there are patches.
    """

    name: str
    poolings: Mapping[str, tuple[Encode, str]]
    patches: tuple[Encode, str] | None = None


def floor_of_pixels(size: int = PIXEL_SIZE) -> Encoder:
    return Encoder(f"pixels {size}x{size}", {"": (pixels(size), f"pixels-{size}")})


def check_encoders(encoders: Sequence[Encoder], sets: Sequence[Labelled], cache: Path, attentive: bool) -> None:
    """Have every encoder see one picture, so that what it refuses is told before the work; warn of patch features that
    the disk of `cache` has no room for.
    """
    picture, pictures = sets[0].train.open(0), sum(len(split) for each in sets for split in (each.train, each.test))
    needed = 0
    for encoder in encoders:
        for encode, _ in encoder.poolings.values():
            encode([picture])
        if attentive and encoder.patches:
            needed += encoder.patches[0]([picture]).numel() * np.dtype(np.float16).itemsize * pictures
    room = shutil.disk_usage(next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())).free
    if needed > room:
        log.warning(
            "the patch features of %d pictures take %.1f GB, and %s has room for %.1f GB; --cache names another folder",
            pictures, needed / 1e9, cache, room / 1e9,
        )  # fmt: skip


def probe_all(
    encoders: Sequence[Encoder],
    data: Labelled,
    p: EvaluateParams,
    shots: Sequence[int],
    cache: Path,
    device: torch.device,
    attentive: bool = False,
) -> dict[str, Any]:
    """The table of all encoders on one labelled set, and what its reader must know.

    shots: pictures per class of few-shot probes. attentive: also that probe.
    """

    def made(name: str, encode: Encode, mark: str) -> Frozen:
        splits = (("train", data.train), ("test", data.test))
        train, test = (frozen_features(encode, mark, split, cache, f"{name}, {which}") for which, split in splits)
        return Frozen(train, test)

    frozen = {
        encoder.name: {pooling: made(encoder.name, *how) for pooling, how in encoder.poolings.items()}
        for encoder in encoders
    }
    patches = {each.name: made(each.name, *each.patches) for each in encoders if attentive and each.patches}
    rows: list[dict[str, Any]] = []
    if dist.is_main():
        of = partial(passes, p, len(data.train), len(data.classes))
        total = sum(of(count, len(poolings)) for poolings in frozen.values() for count in (None, *shots))
        total += len(patches) * of(None, 1)
        with tqdm(total=total, desc="probe", unit="pass") as progress:
            for name, poolings in frozen.items():
                rows += probe_encoder(name, poolings, data, p, shots, device, progress.update)
                if name in patches:
                    rows.append(attend_encoder(name, patches[name], data, p, device, progress.update))
    majority = np.bincount(data.train.labels, minlength=len(data.classes)).argmax()
    return {
        "data": data.name,
        "classes": len(data.classes),
        "train": len(data.train),
        "test": len(data.test),
        "most_frequent_class": float((data.test.labels == majority).mean()),
        "headline": "mean_per_class" if data.mean_per_class else "top_1",
        "rows": rows,
        "warnings": warnings(rows, int((data.test.labels == UNKNOWN).sum())),
    }


def _check_length(model: Any, texts: Sequence[str], fix: str) -> None:
    long = [text for text, is_long in zip(texts, model.too_long(texts), strict=True) if is_long]
    if long:
        raise UserError(
            f"{len(long)} of {len(texts)} texts are longer than the model takes, such as {min(long, key=len)!r}; "
            f"take a model of more tokens, or {fix}"
        )


def retrieve(model: Any, found: Sequence[Referenced], scorer: str, draws: int, seed: int) -> dict[str, Any]:
    """Pictures and their captions found among each other."""
    texts, right_MK = retrieval.belonging([each.captions for each in found])
    _check_length(model, texts, "shorter texts")

    def see(pictures: Sequence[Referenced]) -> Tensor:
        return model.see([each.picture.open() for each in pictures])

    with tqdm(total=len(found), desc="retrieval", unit="image") as progress:
        scored = retrieval.score_matrix(model, found, see, texts, scorer, draws, seed, progress.update)
    return {"scorer": scorer, **retrieval.retrieval(scored, right_MK)}


def zero_shot(
    model: Any,
    data: Labelled,
    classes: Sequence[str],
    templates: Sequence[str],
    scorer: str,
    draws: int,
    seed: int,
    limit: int | None,
) -> dict[str, Any]:
    """The class of test pictures by the names of the classes. limit: the first so many pictures."""
    if len(classes) != len(data.classes):
        raise UserError(f"{len(classes)} class names for the {len(data.classes)} classes of {data.name}; give one each")
    test, texts = data.test.first(limit), retrieval.zero_shot_texts(classes, templates)
    _check_length(model, texts, "shorter ones, such as --template '{}' and --classes with other names")

    def see(numbers: Sequence[int]) -> Tensor:
        return model.see([test.open(number) for number in numbers])

    with tqdm(total=len(test), desc="zero-shot", unit="image") as progress:
        scored = retrieval.score_matrix(model, range(len(test)), see, texts, scorer, draws, seed, progress.update)
    return {"data": data.name, "scorer": scorer, **retrieval.zero_shot(scored, test.labels, len(templates))}


def caption_all(
    loaded: LoadedModel, see: Callable[[Any], Tensor], found: Sequence[Referenced], lengths: Sequence[int], seed: int
) -> dict[str, Any]:
    """CIDEr, BLEU and ROUGE-L of captions written for pictures, by sampler and length, and blind."""
    with tqdm(total=len(found), desc="pictures", unit="image") as progress:
        parts = []
        for start in range(0, len(found), 64):
            some = found[start : start + 64]
            parts.append(see([each.picture.open() for each in some]))
            progress.update(len(some))
    references = [each.captions for each in found]
    with tqdm(desc="captions", unit="caption") as progress:
        rows = score_written(loaded, torch.cat(parts), references, lengths, seed, progress.update)
    return {"pictures": len(found), "references": sum(map(len, references)), "rows": rows}


def captions_page(found: Sequence[Referenced], written: Sequence[str], title: str) -> str:
    """A page that shows pictures with what was written and the true captions."""
    cards = []
    for each, text in zip(found, written, strict=True):
        picture, data = each.picture.open(), io.BytesIO()
        picture.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.LANCZOS)
        picture.save(data, "JPEG", quality=90)
        true = "<br>".join(html.escape(caption) for caption in each.captions)
        source = f"data:image/jpeg;base64,{base64.b64encode(data.getvalue()).decode()}"
        cards.append(f'<figure><img src="{source}" alt=""><b>{html.escape(text)}</b><p>{true}</p></figure>')
    style = (
        "body{font:15px sans-serif;margin:2em}main{display:flex;flex-wrap:wrap;gap:1.5em}figure{width:220px;margin:0}"
        "img{display:block;margin-bottom:.4em}p{color:#555;margin:.3em 0;font-size:13px}"
    )
    head = f"<meta charset=utf-8><title>{html.escape(title)}</title><style>{style}</style>"
    return f"<!doctype html><html lang=en>{head}<h1>{html.escape(title)}</h1><main>{''.join(cards)}</main></html>\n"


def write_results(folder: Path, results: Mapping[str, Any], facts: Mapping[str, Any], page: str = "") -> None:
    """`results.json`, and `captions.html` where there is a page; the folder is replaced."""
    with whole_folder(folder) as temporary:
        write_json(temporary / "results.json", {**facts, **results})
        if page:
            (temporary / "captions.html").write_text(page, encoding="utf-8")
        write_manifest(temporary, inputs=dict(facts), counts={})
