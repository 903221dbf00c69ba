"""Pictures with their captions from files of COCO's kinds.

`captions_val2014.json`       COCO: "images" with id and file_name, "annotations" with image_id and caption
`coco_karpathy_test.json`     a list of image and caption, which is a text or a list of them
`dataset_coco.json`           Karpathy: "images" with filename, perhaps filepath, sentences with raw, and split
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mdc.errors import UserError
from mdc.eval.benchmarks import Picture, PictureFolder


@dataclass(frozen=True)
class Referenced:
    """A picture and its true captions, at least one."""

    picture: Picture
    captions: tuple[str, ...]


def read_references(path: Path, images: Path, split: str = "test", limit: int | None = None) -> list[Referenced]:
    """The pictures of a file in its order, each with its captions.

    images: the folder that the names start from, or that holds the pictures by their last name. split: of files that
    hold several. limit: the first so many. Raises UserError for another kind of file, or missing pictures.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        named = _named(content, split)
    except FileNotFoundError:
        raise UserError(f"{path} is not there; give a file of captions") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is no file of captions of COCO's kinds ({error!r}); see mdc/eval/references.py for what is read"
        ) from None
    folder = PictureFolder(images)
    found = [
        Referenced(Picture(folder(name)), tuple(captions)) for name, captions in list(named.items())[:limit] if captions
    ]
    folder.check()
    if not found:
        raise UserError(f"{path} holds no captions of split {split!r}")
    return found


def _named(content: Any, split: str) -> dict[str, list[str]]:
    """Captions by the name of their picture."""
    named: dict[str, list[str]] = {}
    if isinstance(content, list):
        for entry in content:
            captions = entry["caption"]
            named.setdefault(entry["image"], []).extend([captions] if isinstance(captions, str) else captions)
    elif "annotations" in content:
        name_of: Mapping[Any, str] = {entry["id"]: entry["file_name"] for entry in content["images"]}
        named = {name: [] for name in name_of.values()}
        for entry in content["annotations"]:
            named[name_of[entry["image_id"]]].append(entry["caption"])
    else:
        for entry in content["images"]:
            if entry.get("split", split) == split:
                name = str(Path(entry.get("filepath", "")) / entry["filename"])
                named[name] = [sentence["raw"] for sentence in entry["sentences"]]
    return named
