"""Files of sweeps: which runs they make, and what is refused."""

from pathlib import Path

import pytest
from source_files import ROOT

from mdc.config import SweepPlan, load_sweep
from mdc.errors import UserError

SHIPPED = sorted((ROOT / "infra" / "sweeps").glob("*.yaml"))


def planned(folder: Path, text: str, variant: str = "") -> SweepPlan:
    (folder / "try.yaml").write_text(text, encoding="utf-8")
    return load_sweep(folder / "try.yaml", ROOT / "params.yaml", variant)


def test_every_cell_meets_every_combination_and_seed(tmp_path: Path) -> None:
    plan = planned(
        tmp_path,
        "base: {pretrain: {steps: 200}}\n"
        "cells:\n  with t: {pretrain: {objective: mdc}}\n  '[0, 1]: a/b': {pretrain: {objective: cmlm, steps: 300}}\n"
        "grid:\n  pretrain.t_min: [0.0, 0.5]\n"
        "seeds: [3, 5]\n",
    )
    assert [(run.cell, run.seed) for run in plan.runs] == [
        (f"{name}, t_min={t}", seed) for name in ("with t", "[0, 1]: a/b") for t in (0.0, 0.5) for seed in (3, 5)
    ]
    pretrain = [run.params.pretrain for run in plan.runs]
    assert [p.objective for p in pretrain] == ["mdc"] * 4 + ["cmlm"] * 4
    assert [p.t_min for p in pretrain] == [0.0, 0.0, 0.5, 0.5] * 2
    assert [p.steps for p in pretrain] == [200] * 4 + [300] * 4
    assert [p.seed for p in pretrain] == [3, 5] * 4
    outputs = [run.params.paths.outputs for run in plan.runs]
    assert outputs[0] == "outputs/sweeps/try/with-t-t_min=0.0/seed-3"
    assert outputs[7] == "outputs/sweeps/try/0-1-a-b-t_min=0.5/seed-5"
    assert len({*outputs, *(run.params.paths.runs for run in plan.runs)}) == 16
    assert {run.params.paths.data for run in plan.runs} == {"data"}
    assert {run.params.paths.kept for run in plan.runs} == {Path("runs/features")}, "what they have in common"


def test_seeds_alone_make_a_sweep(tmp_path: Path) -> None:
    assert [(run.cell, run.seed) for run in planned(tmp_path, "seeds: [0, 1]\n").runs] == [("base", 0), ("base", 1)]


def test_a_variant_lies_over_the_base(tmp_path: Path) -> None:
    text = "base: {pretrain: {steps: 200, lr: 0.1}}\nvariants: {big: {pretrain: {steps: 900}}}\n"
    plan = planned(tmp_path, text, "big")
    assert (plan.name, plan.outputs) == ("try-big", Path("outputs/sweeps/try-big"))
    assert (plan.runs[0].params.pretrain.steps, plan.runs[0].params.pretrain.lr) == (900, 0.1)
    with pytest.raises(UserError, match=r"unknown variant 'bigg' \(did you mean 'big'\?\)"):
        planned(tmp_path, text, "bigg")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("grids: {pretrain.lr: [1]}", "unknown parameter grids (did you mean 'grid'?)"),
        ("grid: {pretrain.lr: []}", "grid.pretrain.lr = []"),
        ("grid: {pretrain.lr: 0.1}", "grid.pretrain.lr = 0.1"),
        ("grid: {objective: [mdc]}", "grid key 'objective' must name a section and a parameter"),
        ("grid: {pretrain.objectve: [mdc]}", "cell objectve=mdc: unknown parameter pretrain.objectve (did you mean"),
        ("grid: {pretrain.objective: [mdc, clap]}", "cell objective=clap: pretrain.objective = 'clap'"),
        ("grid: {pretrain.t_min: [0.5, 1.0]}", "cell t_min=1.0: pretrain: t_min 1.0 must be below t_max 1.0"),
        ("grid: {download.image_size: [40]}", "download cannot be changed by a sweep"),
        ("base: {paths: {outputs: x}}", "paths cannot be changed by a sweep"),
        ("grid: {pretrain.seed: [0, 1]}", "pretrain.seed is set by `seeds`"),
        ("seeds: [1, 1]", "seeds [1, 1] holds one twice"),
        ("seeds: []", "seeds = []"),
        ("seeds: [-1]", "seeds.0 = -1"),
        ("cells: {a b: {}, a/b: {}}", "cell 'a/b' and 'a b' would share a folder"),
        ("cells: {a: 3}", "cells.a = 3"),
        ("grid: {pretrain.lr: [0.1, 0.1]}", "would share a folder"),
        ("- mdc", "must hold sections"),
    ],
)
def test_mistakes_are_told_with_their_place(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        planned(tmp_path, text)
    assert str(tmp_path / "try.yaml") in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_sweeps_run_on_the_sample_and_on_larger_data(path: Path, tmp_path: Path) -> None:
    small = load_sweep(path, ROOT / "params.yaml")
    assert {run.seed for run in small.runs} == {0, 1, 2}
    assert {run.params.pretrain.preset for run in small.runs} == {"nano"}
    assert sum(run.params.pretrain.steps for run in small.runs) < 10_000  # an hour on two cores
    text = (ROOT / "params.yaml").read_text(encoding="utf-8")
    for old, new in (("image_size: 40 ", "image_size: 256 "), ("max_tokens: 12 ", "max_tokens: 64 ")):
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "cc12m.yaml").write_text(text, encoding="utf-8")
    large = load_sweep(path, tmp_path / "cc12m.yaml", "cc12m")
    assert {run.params.pretrain.encoder for run in large.runs} == {"vit_base_patch16_224"}
    assert [run.cell for run in large.runs] == [run.cell for run in small.runs]


def test_the_five_ablations_are_there() -> None:
    assert [path.stem for path in SHIPPED] == ["bert-ratio", "data-size", "interval", "objective", "with-t"]
