"""The report holds what the files say, escapes what they hold, and fetches nothing."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from finished_run import HOSTILE, World, draw, shapes
from pages import Element, chromium, fetches, parse, squeezed, table

from mdc.errors import UserError
from mdc.files import MANIFEST, read_json, sha256, write_json
from mdc.report.page import compared, lead_over_floors, marked, unmasked
from mdc.report.tables import wilson

MakeWorld = Callable[..., World]


@pytest.fixture(scope="module")
def html(world: World) -> str:
    return world.report()


@pytest.fixture(scope="module")
def page(html: str) -> Element:
    return parse(html)


def section(page: Element, name: str) -> Element:
    (found,) = page.find("section", id=name)
    return found


def test_probe_table_shows_every_row_with_its_interval(page: Element, world: World) -> None:
    _, *rows = table(page, "Test accuracy")
    expected = [
        [
            row["name"],
            *(
                f"{100 * row[f'{metric}_mean']:.1f}"
                + (
                    f" {100 * row[f'{metric}_low']:.1f}–{100 * row[f'{metric}_high']:.1f}"
                    if row["features"] != "majority"
                    else ""
                )
                for metric in ("balanced_accuracy", "accuracy")
            ),
        ]
        for row in world.evaluation("probe")["rows"]
    ]
    assert [row[:3] for row in rows] == expected
    assert rows[0][3:] == ["60.0", "62.0"]
    assert rows[3][3:] == ["–", "–"]  # nothing to find neighbours with


def test_class_table_shows_pictures_and_recalls(page: Element, world: World) -> None:
    header, *rows = table(page, "Pictures per shape")
    assert header == ["shape", "Train", "Test", "Trained encoder", "Untrained encoder", "Raw pixels"]
    probe = world.evaluation("probe")
    for name, train, test, recall, *_ in rows:
        assert (int(train), int(test)) == (probe["class_counts"][name], probe["test_class_counts"].get(name, 0))
        assert recall == f"{100 * probe['rows'][0]['recall_by_class'][name]:.1f}"
    assert sorted(row[0] for row in rows) == probe["classes"]


def test_compositional_table_shows_score_blind_control_and_their_difference(page: Element) -> None:
    _, every, colour, *_ = table(page, "Captions that outscore")
    assert every == ["all fair pairs 160 pairs, 1 tied", "82.5 75.9–87.6", "50.7 43.1–58.4", "85.6"]
    assert colour[0] == "colour 120 pairs, 1 tied"
    assert "50.0 by chance" in page.find("header")[0].text


def test_the_page_opens_with_what_the_numbers_mean(page: Element) -> None:
    probe, pairs = (squeezed(p.text) for p in section(page, "results").children[2:4])
    assert "balanced accuracy of 71.2 %, against 48.7 % on the untrained encoder, the best floor" in probe
    assert "over raw pixels, is 10.1 points (95 % interval over test pictures 5.2 to 14.9): training" in probe
    assert "82.5 % of 160 pairs, against 50.7 % when it cannot see the picture: 31.8 points more" in pairs


def test_numbers_at_the_head_stand_beside_their_floors(page: Element) -> None:
    tiles = [squeezed(tile.text) for tile in page.find("dl", class_="tiles")[0].children]
    assert tiles[0].startswith(
        "Linear probe71.2 %balanced accuracy; the best floor, the untrained encoder, reaches 48.7"
    )
    assert "50.7 without the picture" in tiles[1]


@pytest.mark.parametrize(
    ("margin", "says"),
    [
        (
            (0.04, 0.012, 0.07),
            "is 4.0 points (95 % interval over test pictures 1.2 to 7.0): training on captions helped.",
        ),
        (
            (0.04, -0.01, 0.07),
            "is 4.0 points (95 % interval over test pictures −1.0 to 7.0), so this run alone does not",
        ),
        ((-0.02, -0.05, 0.01), "is −2.0 points (95 % interval over test pictures −5.0 to 1.0), so this run alone does"),
        ((-0.04, -0.06, -0.01), "−6.0 to −1.0): training on captions did not help here."),
    ],
)
def test_the_probe_is_judged_by_its_smallest_lead(margin: tuple[float, ...], says: str) -> None:
    names = ("balanced_accuracy", "balanced_accuracy_low", "balanced_accuracy_high")
    leads = {"untrained": (0.2, 0.1, 0.3), "pixels": margin}
    said = lead_over_floors([{"over": over, **dict(zip(names, lead, strict=True))} for over, lead in leads.items()])
    assert says in said
    assert "over raw pixels" in said


@pytest.mark.parametrize(
    ("seen", "blind", "says"),
    [
        (0.80, 0.50, "30.0 points more, owed to the picture, and the 95 % intervals do not meet"),
        (0.55, 0.50, "5.0 points more, but the 95 % intervals meet, so this run alone proves no gain"),
        (0.50, 0.50, "no difference, so this run does not show that the picture helps"),
        (0.50, 0.55, "5.0 points less, so this run does not show that the picture helps"),
    ],
)
def test_the_verdict_on_pairs_says_no_more_than_the_numbers(seen: float, blind: float, says: str) -> None:
    assert compared(wilson(seen, 160), wilson(blind, 160)) == says


def test_without_floors_nothing_is_claimed(make_world: MakeWorld) -> None:
    run = make_world()
    rows = [row for row in run.evaluation("probe")["rows"] if row["features"] in ("model", "majority")]
    run.change("probe", rows=rows, margins=[])
    text = squeezed(section(parse(run.report()), "results").text)
    assert "does not show what training gave" in text
    assert "25.0 % on always naming the most frequent class" in text


def test_dropped_and_kept_pairs_add_up_to_the_list(make_world: MakeWorld) -> None:
    pairs = [*shapes(), replace(shapes()[0], uid="talker", caption="a " * 30, picture=draw("tiny", "pink", "bar"))]
    run = make_world(pairs)
    page = parse(run.report())
    _, *rows = table(page, "Pairs of the list that did not")
    assert [row[:2] for row in rows] == [
        ["download: http 404", "2"],
        ["download: too large", "1"],
        ["caption: missing", "1"],
        ["caption: too long", "1"],
    ]
    amounts = [squeezed(step.text) for step in page.find("ol", class_="flow")[0].find("strong")]
    assert amounts[:3] == ["73", "72", "72"]
    assert "from a list of 77" in page.text
    assert 72 + sum(int(row[1]) for row in rows) == 77


def test_sample_pairs_show_the_tokens_of_the_shards(page: Element, world: World) -> None:
    train = [sample for sample in world.samples if sample["split"] == "train"][:6]
    cards = section(page, "pairs").find("li", class_="card")
    assert [squeezed(card.find("p")[0].text) for card in cards] == [sample["caption"] for sample in train]
    for card, sample in zip(cards, train, strict=True):
        chips = [squeezed(chip.text) for chip in card.find("li", class_="chip")]
        assert len(chips) == len(sample["tokens"])
        assert chips[-1] == "[EOS]"
        assert "".join(chips[:-1]).replace("##", "") == sample["caption"].replace(" ", "")


def test_pictures_are_the_stored_bytes(page: Element, world: World) -> None:
    import base64

    first = next(sample for sample in world.samples if sample["split"] == "train")
    stored = next(pair.picture for pair in world.pairs if pair.uid == first["uid"])
    image = section(page, "pairs").find("img")[0]
    assert base64.b64decode(image.attributes["src"].removeprefix("data:image/png;base64,")) == stored
    assert image.attributes["alt"] == first["caption"]


def test_large_pictures_are_shown_smaller(make_world: MakeWorld) -> None:
    import io

    from PIL import Image

    def enlarge(picture: bytes) -> bytes:
        buffer = io.BytesIO()
        Image.open(io.BytesIO(picture)).resize((800, 400)).save(buffer, "png")
        return buffer.getvalue()

    run = make_world([replace(pair, picture=enlarge(pair.picture)) for pair in shapes()])
    sizes = {(i.attributes["width"], i.attributes["height"]) for i in parse(run.report()).find("img")}
    assert sizes == {("224", "112")}


def test_unmasking_marks_masks_and_new_words(page: Element) -> None:
    (steps,) = section(page, "writing").find("table", class_="steps")
    states = [[span.attributes["class"] for span in row.find("span")] for row in steps.find("tr")[1:]]
    assert states[0] == ["mask"] * 4
    assert states[2] == ["mask", "new", "old", "mask"]
    assert states[-1] == ["new", "old", "old", "old"]


def test_unmasked_knows_other_spellings_of_the_mask() -> None:
    steps = unmasked([["a", "<mask>"], ["a", "[MASK]"], ["a", "dog"]], {"[MASK]", "<mask>"})
    assert [[token["state"] for token in step] for step in steps] == [["old", "mask"], ["old", "mask"], ["old", "new"]]


def test_marked_shows_the_words_that_differ() -> None:
    words = marked("a small red circle", "a large blue circle")
    assert [(word.text, word.changed) for word in words] == [("a", False), ("small red", True), ("circle", False)]
    assert [word.text for word in marked("", "a")] == []


def test_neighbours_show_their_similarity(page: Element, world: World) -> None:
    rows = section(page, "neighbours").find("ul", class_="neighbours")[0].children
    examples = world.evaluation("neighbours")["examples"]
    assert len(rows) == len(examples)
    for row, example in zip(rows, examples, strict=True):
        shown = [squeezed(caption.text) for caption in row.find("ol")[0].find("figcaption")]
        assert shown == [f"{near['similarity']:.3f}{near['caption']}" for near in example["neighbours"]]


def test_settings_name_data_version_and_what_was_changed(page: Element, world: World) -> None:
    settings = section(page, "settings")
    assert read_json(world["shards"] / "index.json")["version"] in settings.text
    assert "1,500 (encoder 1,000, decoder 500)" in settings.text
    changed = {squeezed(row.text) for row in settings.find("tr", class_="strong")}
    assert "max_tokens8" in changed
    assert not any(row.startswith(("preset", "steps")) for row in changed)
    assert "Shapes by the tests, CC0" in page.find("footer")[0].text


EMPTY = {
    "probe": {"rows": [], "margins": [], "note": "no probe: train has 0 classes"},
    "compositional": {"rules": [], "examples": [], "note": "no pairs: no caption becomes another"},
    "captions": {"examples": [], "note": "a model of objective clip compares captions but writes none"},
    "neighbours": {"examples": []},
}


@pytest.mark.parametrize(
    ("part", "place", "says"),
    [
        ("probe", "results", "No probe: train has 0 classes."),
        ("compositional", "results", "No pairs: no caption becomes another."),
        ("captions", "writing", "A model of objective clip compares captions but writes none."),
        ("neighbours", "neighbours", "The evaluation made none."),
    ],
)
def test_a_missing_part_is_left_out_with_its_reason(make_world: MakeWorld, part: str, place: str, says: str) -> None:
    run = make_world()
    run.change(part, **EMPTY[part])
    page = parse(run.report())
    assert [squeezed(p.text) for p in section(page, place).find("p", class_="absent")] == [says]
    assert len(page.find("p", class_="absent")) == 1


def test_a_run_without_any_score_still_has_a_page(make_world: MakeWorld) -> None:
    run = make_world()
    for part, values in EMPTY.items():
        run.change(part, **values)
    write_json(run["evaluation"] / "metrics.json", {"compositional": {}})
    page = parse(run.report())
    assert "there is no score yet" in page.text
    assert len(page.find("p", class_="absent")) == 4


def test_written_captions_are_scored_beside_blind_ones(world: World) -> None:
    writing = section(parse(world.report()), "writing")
    (table,) = [t for t in writing.find("table") if "test pictures" in t.find("caption")[0].text]
    cells = [squeezed(cell.text) for cell in table.find("tr")[1].find("td")]
    assert cells == ["41.2", "30.3", "20.0", "10.0", "45.6", "4.6", "123.4", "12.3"]


def test_a_causal_model_has_captions_but_no_unmasking(make_world: MakeWorld) -> None:
    run = make_world(pretrain={"objective": "autoregressive"})
    examples = [{**example, "sampler": "autoregressive"} for example in run.evaluation("captions")["examples"]]
    write_json(run["evaluation"] / "captions.json", {"examples": examples})
    writing = section(parse(run.report()), "writing")
    assert "this model writes from left to right" in squeezed(writing.text)
    assert len(writing.find("img")) == len(examples)


def test_hostile_text_stays_text(make_world: MakeWorld) -> None:
    """Captions, classes and rules come from other people's files, and must not become markup anywhere."""
    pairs = [replace(pair, caption=f"{HOSTILE} {pair.caption}", label=f"<b>{pair.label}") for pair in shapes()]
    run = make_world(pairs, caption={"max_tokens": 200}, report={"title": HOSTILE, "credit": HOSTILE})
    captions, compositional = run.evaluation("captions"), run.evaluation("compositional")
    captions["unmasking"]["steps"] = [["[MASK]", "[MASK]"], ["</td><script>", "[MASK]"]]
    for example in captions["examples"]:
        example["generated"] = HOSTILE
    for example in captions["filled"]:
        example |= {"template": f"{HOSTILE} [MASK]", "text": f"{HOSTILE} <i>"}
    for example in compositional["examples"]:
        example |= {"foil": HOSTILE, "rule": "<u>$x$"}
    compositional["rules"][0]["rule"] = "<u>$x$ & \"'"
    run.change("captions", **captions)
    run.change("compositional", **compositional)
    page = parse(run.report())
    assert fetches(page) == []
    tags = {element.tag for element in page.everything()}
    assert not tags & {"script", "b", "i", "u", "iframe", "object"} - {"b"}
    assert [b.text for b in page.find("b")] == [
        "download",
        "caption",
        "shard",
        "pretrain",
        "extract",
        "evaluate",
        "report",
    ]
    assert not [a for element in page.everything() for a in element.attributes if a.startswith("on")]
    assert page.find("h1")[0].text == HOSTILE
    assert HOSTILE in section(page, "pairs").find("p", dir="auto")[0].text
    (figure,) = [svg for svg in page.find("svg") if svg.attributes["aria-label"].startswith("Captions that outscore")]
    assert "<u>$x$ & \"'" in figure.text


def test_the_page_fetches_nothing(page: Element, html: str) -> None:
    assert fetches(page) == []
    assert not page.find("script")
    links = [a.attributes["href"] for a in page.find("a")]
    assert [link for link in links if not link.startswith("#")] == ["https://arxiv.org/abs/2510.26799"]
    policy = page.find("meta", **{"http-equiv": "Content-Security-Policy"})[0].attributes["content"]
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def test_the_page_can_be_read_by_all(page: Element) -> None:
    assert page.find("html")[0].attributes["lang"] == "en"
    assert all(image.attributes["alt"] for image in page.find("img"))
    assert all(svg.attributes["role"] == "img" and svg.attributes["aria-label"] for svg in page.find("svg"))
    assert all(t.find("caption") for t in page.find("table"))
    assert all(cell.attributes.get("scope") for cell in page.find("th"))
    ids = [element.attributes["id"] for element in page.everything() if "id" in element.attributes]
    assert len(ids) == len(set(ids))
    targets = {link.attributes["href"][1:] for link in page.find("a") if link.attributes["href"].startswith("#")}
    assert targets <= set(ids)
    levels = [int(element.tag[1]) for element in page.everything() if re.fullmatch("h[1-6]", element.tag)]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))


def test_bytes_depend_on_the_inputs_alone(world: World, html: str, tmp_path: Path) -> None:
    """Another process, with another hash seed, another clock and another place to write to, writes the same."""
    folders = {name: str(folder) for name, folder in world.folders.items() if name != "report"}
    program = (
        "import json, sys; from pathlib import Path\n"
        "from mdc.config import Params; from mdc.report.page import write_report\n"
        "given = json.load(sys.stdin); folders = {name: Path(path) for name, path in given['folders'].items()}\n"
        "write_report(Params.model_validate(given['params']), **folders)"
    )
    folders["output"] = str(tmp_path / "again")
    subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps({"params": world.params.model_dump(), "folders": folders}),
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "12345", "SOURCE_DATE_EPOCH": "86400"},
    )
    for name in ("report.html", MANIFEST):
        assert (tmp_path / "again" / name).read_bytes() == (world["report"] / name).read_bytes()
    manifest = read_json(world["report"] / MANIFEST)
    assert manifest["files"]["report.html"]["sha256"] == sha256(world["report"] / "report.html")
    assert str(world.root) not in html


def test_scores_of_other_shards_are_refused(make_world: MakeWorld) -> None:
    run = make_world()
    stranger = {**run.evaluation("neighbours")["examples"][0], "uid": "a stranger"}
    run.change("neighbours", examples=[stranger])
    with pytest.raises(UserError, match=r"no sample 'a stranger'.*run `mdc stage extract`"):
        run.report()
    assert not run["report"].exists()


def test_an_unfinished_stage_is_named(make_world: MakeWorld) -> None:
    run = make_world()
    (run["evaluation"] / MANIFEST).unlink()
    with pytest.raises(UserError, match="mdc stage evaluate"):
        run.report()


PROBE_SCRIPT = """
const images = [...document.images], root = document.documentElement;
document.body.dataset.seen = JSON.stringify({
  images: images.length, loaded: images.filter(image => image.complete && image.naturalWidth).length,
  width: innerWidth, needed: root.scrollWidth, plots: [...document.querySelectorAll('svg')].map(p => p.clientHeight),
});
"""


def test_chromium_shows_it_without_errors(html: str, tmp_path: Path) -> None:
    """On a phone's width: no message on the console, every picture decoded, nothing wider than the screen."""
    path = tmp_path / "report.html"
    path.write_text(html, encoding="utf-8")
    shot = tmp_path / "shot.png"
    seen = chromium(tmp_path, "--window-size=500,900", f"--screenshot={shot}", path.as_uri())
    assert "CONSOLE" not in seen.stderr
    assert shot.stat().st_size > 10_000

    policy = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
    asking = policy.sub("", html).replace("</body>", f"<script>{PROBE_SCRIPT}</script></body>")
    path.write_text(asking, encoding="utf-8")
    shutil.rmtree(tmp_path / "profile")
    answer = parse(chromium(tmp_path, "--window-size=500,900", "--dump-dom", path.as_uri()).stdout)
    measured = json.loads(answer.find("body")[0].attributes["data-seen"])
    assert measured["images"] == measured["loaded"] == len(parse(html).find("img"))
    assert measured["needed"] <= measured["width"]
    assert all(height > 100 for height in measured["plots"])
