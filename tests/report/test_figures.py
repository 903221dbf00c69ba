"""Figures as inline SVG."""

import re

import numpy as np
import pandas as pd
import pytest
from pages import parse

from mdc.report.figures import (
    PAGE_COLOURS,
    Dots,
    binned,
    compositional_figure,
    length_figure,
    loss_figure,
    probe_figure,
)
from mdc.report.tables import Interval


def dots(name: str, *means: float) -> Dots:
    return Dots(name, tuple(Interval(mean, mean - 0.02, mean + 0.02) for mean in means), strong=name == "model")


def losses() -> pd.DataFrame:
    return pd.DataFrame(
        {"images": [128, 256, 384], "train_loss": [5.0, 3.0, 2.0], "validation_loss": [np.nan, 3.5, 2.5]}
    )


@pytest.fixture(scope="module")
def drawn() -> dict[str, str]:
    kept, dropped = np.array([2, 3, 3, 5]), np.array([9, 12])
    return {
        "probe": probe_figure([dots("model", 0.7, 0.8), dots("pixels", 0.4, 0.6)], ("balanced", "plain"), "Probe"),
        "compositional": compositional_figure(
            [dots("<$x$>", 0.8, 0.5, 0.9), dots("hue", 0.0, 0.0, 1.0)], 0.5, "Pairs & <foils>"
        ),
        "loss": loss_figure(losses(), "nats", "Loss"),
        "lengths": length_figure(kept, dropped, "Lengths"),
    }


def test_figures_take_their_colours_from_the_page(drawn: dict[str, str]) -> None:
    for name, svg in drawn.items():
        assert "var(--accent)" in svg, name
        assert not [stand_in for stand_in in PAGE_COLOURS if stand_in in svg], name
        assert set(re.findall(r"#[0-9a-f]{6}\b", svg)) == set(), name  # no colour of its own


def test_figures_are_drawn_alike_every_time(drawn: dict[str, str]) -> None:
    assert loss_figure(losses(), "nats", "Loss") == drawn["loss"]
    assert not re.search(r"<metadata|<style|<\?xml|<!DOCTYPE|\d{4}-\d\d-\d\d", "".join(drawn.values()))


def test_ids_of_several_figures_do_not_meet(drawn: dict[str, str]) -> None:
    ids = [i for svg in drawn.values() for i in re.findall(r'\bid="([^"]+)"', svg)]
    assert len(ids) == len(set(ids)) > 0
    for svg in drawn.values():
        used = re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', svg)
        assert {a or b for a, b in used} <= set(ids)


def test_names_are_text_and_not_formulas_or_markup(drawn: dict[str, str]) -> None:
    svg = parse(drawn["compositional"]).children[0]
    assert svg.attributes["aria-label"] == "Pairs & <foils>"
    assert "<$x$>" in [text.text for text in svg.find("text")]


def test_means_are_written_at_the_dots(drawn: dict[str, str]) -> None:
    texts = [text.text for text in parse(drawn["probe"]).find("text")]
    assert {"70.0", "80.0", "40.0", "60.0", "balanced", "plain", "model", "pixels"} <= set(texts)


def test_every_length_falls_into_its_bin() -> None:
    centres, step, (kept, dropped) = binned(np.array([1, 2, 2, 12]), np.array([13, 13]))
    assert step == 1
    assert dict(zip(centres, kept, strict=True)) == {**dict.fromkeys(range(14), 0), 1: 1, 2: 2, 12: 1}
    assert dropped.sum() == dropped[13] == 2

    centres, step, (counts,) = binned(np.arange(1, 301))
    assert (step, len(centres)) == (5, 61)
    assert counts.sum() == 300
    assert counts[1] == 5  # lengths 5 to 9
    assert centres[1] == 7
