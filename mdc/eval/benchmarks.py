"""Published sets of captions with foils, read from their own files: ARO and SugarCrepe.

ARO (Yuksekgonul et al. 2023, arXiv 2210.01936): `visual_genome_relation.json`, `visual_genome_attribution.json`, with
pictures cut to a box, and the caption files behind COCO-Order and Flickr30k-Order (`coco_karpathy_test.json`,
`flickr30k_test.json`). SugarCrepe (Hsieh et al. 2023, arXiv 2306.14610): seven files such as `swap_obj.json`.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from PIL import Image

from mdc.config import choose
from mdc.errors import UserError
from mdc.eval.shuffles import cleaned, shuffled

Box = tuple[int, int, int, int]  # left, top, right, bottom, pixels

# Questions in each published file, symmetric relations included: ARO section 2 and its authors' issue tracker (25 010
# and 5 000 captions), SugarCrepe's repository (number 108 of swap_obj was taken out).
EXPECTED = {
    "vg_relation": 23_937,
    "vg_attribution": 28_748,
    "coco_order": 25_010,
    "flickr_order": 5_000,
    "add_att": 692,
    "add_obj": 2_062,
    "replace_att": 788,
    "replace_obj": 1_652,
    "replace_rel": 1_406,
    "swap_att": 666,
    "swap_obj": 245,
}
SUGAR_CREPE = tuple(EXPECTED)[4:]
GROUPS = {
    "aro": ("vg_relation", "vg_attribution", "coco_order", "flickr_order"),
    "sugar_crepe": SUGAR_CREPE,
}
FILES = {
    "vg_relation": "visual_genome_relation.json",
    "vg_attribution": "visual_genome_attribution.json",
    "coco_order": "coco_karpathy_test.json",
    "flickr_order": "flickr30k_test.json",
    **{name: f"{name}.json" for name in SUGAR_CREPE},
}
MACRO_AT_LEAST = {"vg_attribution": 25}  # questions of an attribute pair in the mean over pairs, as the authors have it

# Relations without a right answer when subject and object change places, or otherwise left out of the authors' figures:
# the list of the notebook with which they replicate them.
_SYMMETRIC = """
    adjusting; attached to; between; bigger than; biting; boarding; brushing; chewing; cleaning; climbing; close to;
    coming from; coming out of; contain; crossing; dragging; draped over; drinking; drinking from; driving;
    driving down; driving on; eating from; eating in; enclosing; exiting; facing; filled with; floating in; floating on;
    flying; flying above; flying in; flying over; flying through; full of; going down; going into; going through;
    grazing in; growing in; growing on; guiding; hanging from; hanging in; hanging off; hanging over; higher than;
    holding onto; hugging; in between; jumping off; jumping on; jumping over; kept in; larger than; leading;
    leaning over; leaving; licking; longer than; looking in; looking into; looking out; looking over; looking through;
    lying next to; lying on top of; making; mixed with; mounted on; moving; on the back of; on the edge of;
    on the front of; on the other side of; opening; painted on; parked at; parked beside; parked by; parked in;
    parked in front of; parked near; parked next to; perched on; petting; piled on; playing; playing in; playing on;
    playing with; pouring; reaching for; reading; reflected on; riding on; running in; running on; running through;
    seen through; sitting behind; sitting beside; sitting by; sitting in front of; sitting near; sitting next to;
    sitting under; skiing down; skiing on; sleeping in; sleeping on; smiling at; sniffing; splashing; sprinkled on;
    stacked on; standing against; standing around; standing behind; standing beside; standing in front of;
    standing near; standing next to; staring at; stuck in; surrounding; swimming in; swinging; talking to; topped with;
    touching; traveling down; traveling on; tying; typing on; underneath; wading in; waiting for; walking across;
    walking by; walking down; walking next to; walking through; working in; working on; worn on; wrapped around;
    wrapped in; by; of; near; next to; with; beside; on the side of; around
"""
SYMMETRIC = frozenset(" ".join(relation.split()) for relation in _SYMMETRIC.split(";"))


@dataclass(frozen=True)
class Picture:
    """A picture file, or the part of it in a box."""

    path: Path
    box: Box | None = None

    def __str__(self) -> str:
        return self.path.name if self.box is None else f"{self.path.name}{list(self.box)}"

    def open(self) -> Image.Image:
        """The picture, or its part; as the authors cut it, pixels outside the picture are black."""
        try:
            with Image.open(self.path) as image:
                return image.convert("RGB").crop(self.box)
        except (OSError, SyntaxError, Image.DecompressionBombError) as error:
            raise UserError(f"{self.path} is not a picture that can be read: {error}") from None


@dataclass(frozen=True)
class Question:
    """A picture with its caption and foils. key: its name in the file. row: what it counts under, as its relation."""

    key: str
    picture: Picture
    caption: str
    foils: tuple[str, ...]
    row: str = ""


@dataclass(frozen=True)
class Benchmark:
    """One published set. left_out: questions that do not count, by reason. shuffles: foils that were made, to store."""

    name: str
    questions: list[Question]
    left_out: dict[str, int] = field(default_factory=dict)
    shuffles: list[dict[str, Any]] = field(default_factory=list)

    def shorter(self, too_long: Callable[[Sequence[str]], Sequence[bool]], skip: bool) -> "Benchmark":
        """Without the questions whose captions a model cannot take whole; UserError if there are some and not `skip`.

        too_long: captions -> which of them are.
        """
        texts = list(dict.fromkeys(text for q in self.questions for text in (q.caption, *q.foils)))
        long = {text for text, is_long in zip(texts, too_long(texts), strict=True) if is_long}
        kept = [q for q in self.questions if long.isdisjoint((q.caption, *q.foils))]
        dropped = len(self.questions) - len(kept)
        if dropped and not skip:
            raise UserError(
                f"{self.name}: {dropped} of {len(self.questions)} questions have captions longer than the model takes, "
                f"such as {min(long, key=len)!r}; take a model of more tokens, or leave them out (--skip-long)"
            )
        return replace(self, questions=kept, left_out={**self.left_out, "too long": dropped})

    @property
    def macro_at_least(self) -> int:
        return MACRO_AT_LEAST.get(self.name, 1)

    @property
    def identical(self) -> list[str]:
        """Keys of questions with a foil that reads as the caption: nothing can tell them apart, so they are ties."""
        return [q.key for q in self.questions if any(foil.split() == q.caption.split() for foil in q.foils)]


def read_benchmark(name: str, data: Path, images: Path, seed: int = 0, partial: bool = False) -> Benchmark:
    """Read a set by name from the folder of its published file.

    images: the folder that the file's picture names start from, or that holds the pictures by their last name. seed: of
    shuffled words. partial: take fewer questions than were published. Raises UserError for a missing file, an entry
    that lacks something, another number of questions than published, or missing pictures, with a list.
    """
    read = choose("benchmark", name, READERS)
    path = data / FILES[name]
    entries = dict(_entries(path))
    if len(entries) != EXPECTED[name] and not partial:
        raise UserError(
            f"{path} holds {len(entries)} questions, {EXPECTED[name]} were published; take the published file, or say "
            "that it is a part (--partial)"
        )
    return read(name, path, entries, PictureFolder(images), seed)


def _entries(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The entries of a list or of a mapping, in its order, by key; a caption file gives one entry per caption."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is not there; name the folder that holds the published files") from None
    except ValueError as error:
        raise UserError(f"{path} is no JSON file: {error}") from None
    pairs = content.items() if isinstance(content, dict) else enumerate(content)
    for key, entry in pairs:
        if not isinstance(entry, dict):
            raise UserError(f"{path}: entry {key} is no mapping; take the published file")
        captions = entry.get("caption")
        if isinstance(captions, list):
            yield from ((f"{key}-{i}", {**entry, "caption": caption}) for i, caption in enumerate(captions))
        else:
            yield str(key), entry


class PictureFolder:
    """Finds pictures by name, and remembers what is missing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.missing: dict[str, None] = {}
        self._found: dict[str, Path] = {}

    def __call__(self, name: str) -> Path:
        if name not in self._found:
            inside, flat = self.folder / name, self.folder / Path(name).name
            self._found[name] = flat if not inside.is_file() and flat.is_file() else inside
            if not self._found[name].is_file():
                self.missing[name] = None
        return self._found[name]

    def check(self) -> None:
        if self.missing:
            names = list(self.missing)
            more = f" and {len(names) - 20} more" if len(names) > 20 else ""
            raise UserError(
                f"{len(names)} pictures are not in {self.folder}: {', '.join(names[:20])}{more}; "
                "complete the folder, since a score without them would be of another set"
            )


def _value(path: Path, key: str, entry: Mapping[str, Any], name: str, kind: type) -> Any:
    value = entry.get(name)
    if not isinstance(value, kind):
        raise UserError(f"{path}: entry {key} has no {name}; take the published file")
    return value


def _visual_genome(name: str, path: Path, entries: Mapping[str, Any], pictures: PictureFolder, seed: int) -> Benchmark:
    """VG-Relation without symmetric relations, or VG-Attribution."""
    questions, left_out = [], 0
    for key, entry in entries.items():
        if name == "vg_relation":
            row = _value(path, key, entry, "relation_name", str)
            if row in SYMMETRIC:
                left_out += 1
                continue
        else:
            row = "_".join(map(str, _value(path, key, entry, "attributes", list)[:2]))
        x, y, w, h = (int(_value(path, key, entry, f"bbox_{side}", int | float)) for side in "xywh")  # type: ignore[arg-type]
        if w < 1 or h < 1:
            raise UserError(f"{path}: entry {key} has a box of {w} x {h} pixels; take the published file")
        picture = Picture(pictures(_value(path, key, entry, "image_path", str)), (x, y, x + w, y + h))
        caption, foil = (_value(path, key, entry, f"{which}_caption", str) for which in ("true", "false"))
        questions.append(Question(key, picture, caption, (foil,), row))
    pictures.check()
    return Benchmark(name, questions, {"symmetric relation": left_out} if name == "vg_relation" else {})


def _sugar_crepe(name: str, path: Path, entries: Mapping[str, Any], pictures: PictureFolder, seed: int) -> Benchmark:
    questions = []
    for key, entry in entries.items():
        picture = Picture(pictures(_value(path, key, entry, "filename", str)))
        caption, foil = (_value(path, key, entry, which, str) for which in ("caption", "negative_caption"))
        questions.append(Question(key, picture, caption, (foil,)))
    pictures.check()
    return Benchmark(name, questions)


def _order(name: str, path: Path, entries: Mapping[str, Any], pictures: PictureFolder, seed: int) -> Benchmark:
    """Captions against themselves in four other orders; "foils" of an entry, as stored by an earlier run, are kept."""
    questions, shuffles = [], []
    for key, entry in entries.items():
        caption = cleaned(_value(path, key, entry, "caption", str))
        image = _value(path, key, entry, "image", str)
        foils = entry["foils"] if "foils" in entry else shuffled(caption, seed)
        shuffles.append({"image": image, "caption": caption, "foils": foils})
        if foils:
            questions.append(Question(key, Picture(pictures(image)), caption, tuple(foils.values())))
    pictures.check()
    return Benchmark(name, questions, {"no other order": len(shuffles) - len(questions)}, shuffles)


Reader = Callable[[str, Path, Mapping[str, Any], PictureFolder, int], Benchmark]
READERS: dict[str, Reader] = {
    "vg_relation": _visual_genome,
    "vg_attribution": _visual_genome,
    "coco_order": _order,
    "flickr_order": _order,
    **dict.fromkeys(SUGAR_CREPE, _sugar_crepe),
}


def sets_of(name: str) -> Sequence[str]:
    """The sets that a name stands for: one, or all of `aro` or `sugar_crepe`."""
    return choose("benchmark", name, GROUPS | {each: (each,) for each in READERS})
