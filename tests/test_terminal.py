"""Tables at every width: numbers stay whole."""

import re
import sys

import pytest

from mdc.eval.tables import caption_table, probe_table, retrieval_table, zero_shot_table
from mdc.terminal import show

MODEL = "open_clip:ViT-B-32@/data/models/laion/open_clip_pytorch_model[final].bin"


def probed(model: str = MODEL) -> dict:
    values = {"top_1": 0.1234, "top_5": 0.5678, "mean_per_class": 0.9012}
    ends = {f"{name}_{end}": value + sign * 0.0312 for name, value in values.items() for end, sign in SIDES}
    rows = [{"features": model, "method": method, "train": 1281167, **values, **ends} for method in METHODS]
    return {"data": "imagenet", "train": 1300000, "test": 50000, "most_frequent_class": 0.001, "rows": rows}


SIDES = (("low", -1), ("high", 1))
METHODS = ("linear probe", "attentive probe", "10-shot probe", "20-NN")
NUMBERS = ["12.3 ±3.1", "56.8 ±3.1", "90.1 ±3.1", "1281167"]


@pytest.mark.parametrize("columns", [60, 80, 200, None])
def test_numbers_stay_whole_at_every_width(
    columns: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In terminals of so many columns, and in a pipe."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns or 80))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: columns is not None, raising=False)
    show(probe_table(probed()))
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= (columns or 1000)
    for number in NUMBERS:
        assert sum(number in line for line in lines) == len(METHODS)
    assert "…" not in "".join(lines)
    assert sum(MODEL in line for line in lines) == (len(METHODS) if columns in (200, None) else 0)


def test_every_table_keeps_its_numbers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    recalls = {"recall_at_1": 0.111, "recall_at_5": 0.222, "recall_at_10": 0.333}
    ways = {way: {by: recalls for by in ("score", "pmi", "chance")} for way in ("picture_to_text", "text_to_picture")}
    told = {"top_1": 0.444, "top_5": 0.555, "balanced": 0.666}
    counted = {"pictures": 12345, "texts": 54321, "scorer": "autoregressive", "references": 61234}
    scores = {name: 0.777 for name in ("cider", "bleu_1", "bleu_4", "rouge_l")}
    tables = [
        retrieval_table({**counted, **ways}),
        zero_shot_table({**counted, "data": MODEL, "classes": 1000, "chance": 0.001, **dict.fromkeys(BYS, told)}),
        caption_table({**counted, "rows": [{"sampler": "confidence", "length": 20, **scores, "blind": scores}]}),
    ]
    wanted = (["11.1", "22.2", "33.3"], ["44.4", "55.5", "66.6"], ["0.777"] * 5)
    for table, numbers in zip(tables, wanted, strict=True):
        show(table)
        lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
        assert max(map(len, lines)) <= 60
        assert any(re.findall(r"\d+\.\d+", line) == numbers for line in lines)


def test_names_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    show(probe_table(probed("a[red]b:smile:")))
    assert capsys.readouterr().out.count("a[red]b:smile:") == len(METHODS)


BYS = ("score", "pmi", "blind")
