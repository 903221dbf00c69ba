"""The terminal's tables, and the intervals in them."""

from pathlib import Path

import pytest
from finished_run import World
from rich.console import Console
from scipy import stats

from mdc.errors import UserError
from mdc.files import read_json, write_json, write_manifest
from mdc.report.tables import class_table, compositional_table, terminal_tables, wilson


def shown(evaluation: Path, width: int = 120) -> str:
    console = Console(width=width, file=None, record=True, quiet=False, force_terminal=False)
    with console.capture() as captured:
        for table in terminal_tables(evaluation):
            console.print(table)
    return captured.get()


@pytest.mark.parametrize(("wins", "pairs"), [(0, 7), (7, 7), (30, 40), (1, 1000)])
def test_wilson_agrees_with_scipy(wins: int, pairs: int) -> None:
    expected = stats.binomtest(wins, pairs).proportion_ci(method="wilson")
    interval = wilson(wins / pairs, pairs)
    assert interval.mean == wins / pairs
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high), abs=1e-4)


def test_terminal_shows_every_number_beside_its_floor(world: World) -> None:
    lines = [line.split() for line in shown(world["evaluation"]).splitlines()]
    assert ["Trained", "encoder", "71.2", "70.2–72.2", "80.3", "79.3–81.3", "60.0", "62.0"] in lines
    assert ["Raw", "pixels", "45.2", "44.8–45.6", "70.2", "69.8–70.6", "60.0", "62.0"] in lines
    assert ["size", "(40", "pairs)", "75.0", "59.8–85.8", "50.0", "35.2–64.8", "80.0"] in lines


def test_terminal_shows_what_is_found_beside_chance(world: World) -> None:
    lines = [" ".join(line.split()) for line in shown(world["evaluation"]).splitlines()]
    for line in (
        "Caption of a picture 31.2 61.0 75.0",
        "Caption of a picture (difference to blind) 41.4 72.0 85.0",
        "Picture of a caption (chance) 1.7 8.3 16.7",
        "Class by its name (blind) 10.0 50.0 –",
    ):
        assert line in lines


def test_terminal_shows_written_captions_beside_blind_ones(world: World) -> None:
    lines = [line.split() for line in shown(world["evaluation"]).splitlines()]
    numbers = ["41.2", "30.3", "20.0", "10.0", "45.6", "4.6", "123.4", "12.3"]
    assert ["confidence", "(4", "tokens)", *numbers] in lines
    assert ["ancestral", "(6", "tokens)", *numbers] in lines


def test_terminal_keeps_all_numbers_in_eighty_columns(world: World) -> None:
    text = shown(world["evaluation"], width=80)
    assert all(len(line) <= 80 for line in text.splitlines())
    for number in ("70.2–72.2", "62.0", "82.5", "75.9–87.6", "43.1–58.4", "85.6", "123.4", "12.3"):
        assert number in text


def test_names_are_not_read_as_markup(make_world) -> None:
    run = make_world()
    rules = run.evaluation("compositional")["rules"]
    run.change("compositional", rules=[{**rules[0], "rule": "[red]colour[/red]"}])
    write_manifest(run["evaluation"], {}, {})
    assert "[red]colour[/red]" in shown(run["evaluation"])


def test_a_missing_part_has_no_table(make_world) -> None:
    run = make_world()
    run.change("probe", rows=[])
    write_json(run["evaluation"] / "captions.json", {"examples": []})
    metrics = read_json(run["evaluation"] / "metrics.json")
    del metrics["retrieval"]
    write_json(run["evaluation"] / "metrics.json", metrics)
    write_manifest(run["evaluation"], {}, {})
    (table,) = terminal_tables(run["evaluation"])
    assert str(table.title).startswith("Captions that outscore")


def test_results_of_an_unfinished_evaluation_name_the_stage(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="mdc stage evaluate"):
        terminal_tables(tmp_path / "evaluation")


def test_results_that_are_damaged_name_the_file_and_the_stage(make_world) -> None:
    folder = make_world()["evaluation"]
    write_manifest(folder, {}, {})
    (folder / "metrics.json").write_text("{")
    with pytest.raises(UserError, match=r"evaluation is damaged: metrics\.json has 1 bytes.* `mdc stage evaluate`"):
        terminal_tables(folder)


def test_classes_are_listed_with_their_recalls_and_many_are_summed_up() -> None:
    train = {f"class {i:02d}": 100 - i for i in range(40)}
    test = {"class 00": 7, "class 30": 2, "unseen": 1}
    rows = [{"name": "Trained encoder", "recall_by_class": {"class 00": 0.25}}, {"name": "Most frequent class"}]
    probe = {"label": "kind", "class_counts": train, "test_class_counts": test, "rows": rows}
    table = class_table(probe)
    assert table.columns == ("kind", "Train", "Test", "Trained encoder")
    assert len(table.rows) == 16
    assert [cell.text for cell in table.rows[0]] == ["class 00", "100", "7", "25.0"]
    assert [cell.text for cell in table.rows[1]] == ["class 01", "99", "0", "–"]
    assert [cell.text for cell in table.rows[-1]] == ["26 others", "1,825", "3", "–"]  # 85 + 84 + ... + 61, and unseen


def test_pairs_that_are_not_fair_stand_alone() -> None:
    rule = {"rule": "hue (foil trained on)", "pairs": 4, "mc": 0.25, "blind": 0.0, "pmi": 0.75, "ties": 0}
    table = compositional_table({"scorer": "mc", "rules": [rule]}, {"compositional": {rule["rule"]: rule}})
    assert [row[0].text for row in table.rows] == ["hue *"]
    assert "* The foil was trained on" in table.caption
    assert table.strong == frozenset()
