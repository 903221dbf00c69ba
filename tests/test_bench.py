"""The page of the benchmarks says what was measured."""

from pathlib import Path

import pytest

from bench import frame
from bench.frame import Growth, Result

ORDER = ["fast", "small", "wide"]


def result(row: str, ours: list[float], theirs: list[float], aim: float | None, smaller: bool = False) -> Result:
    return Result(row, "some work", "a library", "images/s", ours, theirs, aim, smaller)


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(frame, "FIGURES", tmp_path / "results.json")
    monkeypatch.setattr(frame, "PAGE", tmp_path / "RESULTS.md")
    return tmp_path / "RESULTS.md"


@pytest.mark.parametrize(
    ("ours", "theirs", "aim", "smaller", "met"),
    [
        ([4.0, 6.0, 5.0], [2.0, 2.0, 2.5], 2.5, False, True),
        ([4.0, 6.0, 5.0], [2.0, 2.0, 2.5], 2.6, False, False),
        ([3.0, 3.0], [5.0, 5.0], 0.6, True, True),
        ([3.1, 3.1], [5.0, 5.0], 0.6, True, False),
        ([3.0], [5.0], None, True, None),
    ],
)
def test_an_aim_is_judged_by_the_ratio_of_medians(
    ours: list[float], theirs: list[float], aim: float | None, smaller: bool, met: bool | None
) -> None:
    assert result("fast", ours, theirs, aim, smaller).is_met() is met


def test_a_row_measured_again_takes_the_place_of_its_former_figures_alone(page: Path) -> None:
    frame.record("small", [result("small", [3.0], [5.0], 0.5, smaller=True)], "machine A", ORDER)
    frame.record("wide", [Growth("wide", "work by size", "images/s", {"8": [1.0], "16": [3.0]})], "machine A", ORDER)
    frame.record("fast", [result("fast", [1.0], [4.0], 2.0)], "machine A", ORDER)
    frame.record("fast", [result("fast", [9.0, 8.0, 7.0], [4.0, 4.0, 2.0], 1.5)], "machine B", ORDER)
    lines = page.read_text().splitlines()
    rows = [line for line in lines if line.startswith(("| fast", "| small", "| wide"))]
    assert len(rows) == 3
    assert "8.00 (7.00–9.00) images/s | 4.00 (2.00–4.00) images/s | **2.00** (2.00–3.50) | ≥ 1.5 met" in rows[0]
    assert "| **0.60** (0.60–0.60) | ≤ 0.5 **missed**" in rows[1]
    assert "8: 1.00 (1.00–1.00); 16: 3.00 (3.00–3.00)" in rows[2]
    assert "- fast: machine B" in lines
    assert "- small, wide: machine A" in lines


def test_sides_are_taken_in_turn_after_a_warm_up() -> None:
    order: list[str] = []
    taken = frame.in_turn({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=2)
    assert order == ["a", "b"] * 3
    assert [len(seconds) for seconds in taken.values()] == [2, 2]
