"""dvc.yaml names all that a stage's result depends on: what it reads, its parameters and the code that it runs."""

import ast
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from source_files import ROOT, imports

from mdc.config import STAGES, Params, load_params
from mdc.stages import STAGES as RUNS
from mdc.stages import Folders

# Code that may change without changing a result: how values are checked, written, tracked, launched and ended. Values
# themselves come from params.yaml, which is complete, and from presets.
WITHOUT_EFFECT = {
    "mdc/__init__.py",
    "mdc/config.py",
    "mdc/data/parallel.py",
    "mdc/data/work.py",
    "mdc/errors.py",
    "mdc/files.py",
    "mdc/processes.py",
    "mdc/ranks.py",
    "mdc/train/launch.py",
    "mdc/train/tracking.py",
}
# What writes a stage's folder. Later stages use it only to read that folder, which is a dependency already.
WRITERS = {"download": "mdc/data/download.py", "caption": "mdc/data/captions.py", "shard": "mdc/data/shards.py"}
# What no import leads to: the module that torchrun starts, and the values that stand for empty ones in params.yaml.
ALSO = {
    "download": {"mdc.layouts"},
    "pretrain": {"mdc.train.__main__", "mdc.presets"},
    "extract": {"mdc.eval.__main__"},
}
DO_NOT_CHANGE_RESULTS = {"paths", "compute", "tracking"}


@pytest.fixture(scope="module")
def graph() -> dict[str, dict[str, Any]]:
    """The stages of dvc.yaml, with the values of params.yaml put in."""
    params = load_params(ROOT / "params.yaml")
    text = (ROOT / "dvc.yaml").read_text(encoding="utf-8")
    for section in ("paths", "download"):
        for name, value in getattr(params, section):
            text = text.replace(f"${{{section}.{name}}}", str(value))
    assert "${" not in text
    stages: dict[str, dict[str, Any]] = YAML(typ="safe").load(text)["stages"]
    return stages


def outs_of(stage: dict[str, Any]) -> list[str]:
    return [out if isinstance(out, str) else next(iter(out)) for out in stage["outs"]]


def code_of(stage: str) -> set[str]:
    """Every file of mdc/ that is imported, directly or not, by what `mdc.stages` imports to run a stage."""
    tree = ast.parse((ROOT / "mdc" / "stages.py").read_text(encoding="utf-8"))
    (function,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == f"_{stage}"]
    names = {str(node.module) for node in ast.walk(function) if isinstance(node, ast.ImportFrom)}
    names |= ALSO.get(stage, set())
    passed_over = WITHOUT_EFFECT | {writer for name, writer in WRITERS.items() if name != stage}
    found: set[str] = set()
    while names:
        files = {path for name in names for path in files_of(name)} - found - passed_over
        found |= files
        names = {name for file in files for name in imports(ROOT / file) if name.startswith("mdc")}
    return found


def files_of(module: str) -> list[str]:
    """The file of a module, or the `__init__.py` of a package that holds code."""
    path = Path(*module.split("."))
    candidates = [ROOT / path.with_suffix(".py"), ROOT / path / "__init__.py"]
    return [str(file.relative_to(ROOT)) for file in candidates if file.is_file() and has_code(file)]


def has_code(path: Path) -> bool:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return any(not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) for node in body)


def test_the_stages_are_the_librarys_in_order(graph: dict[str, dict[str, Any]]) -> None:
    assert tuple(graph) == STAGES == tuple(RUNS)
    assert all(stage["cmd"] == f"exec mdc stage {name}" for name, stage in graph.items())


def test_each_makes_the_folder_that_the_library_writes(graph: dict[str, dict[str, Any]]) -> None:
    at = Folders.of(load_params(ROOT / "params.yaml").paths)
    assert {name: outs_of(stage) for name, stage in graph.items()} == {
        name: [str(run.output(at))] for name, run in RUNS.items()
    }
    assert graph["download"]["outs"] == [{str(at.downloaded): {"persist": True}}]  # what a second run starts from


@pytest.mark.parametrize("stage", STAGES)
def test_the_code_behind_a_result_is_a_dependency(graph: dict[str, dict[str, Any]], stage: str) -> None:
    deps = [dep for dep in graph[stage]["deps"] if dep.startswith("mdc/")]
    assert all((ROOT / dep).exists() for dep in deps)
    code = code_of(stage)
    assert code, stage
    missing = {file for file in code if not any(file == dep or file.startswith(f"{dep}/") for dep in deps)}
    assert not missing, f"{stage} also runs {sorted(missing)}"
    idle = {dep for dep in deps if not any(file == dep or file.startswith(f"{dep}/") for file in code)}
    assert not idle, f"{stage} does not run {sorted(idle)}"


@pytest.mark.parametrize("stage", STAGES)
def test_what_a_stage_reads_was_made_by_one_before_it(graph: dict[str, dict[str, Any]], stage: str) -> None:
    earlier = {out for name in STAGES[: STAGES.index(stage)] for out in outs_of(graph[name])}
    read = {dep for dep in graph[stage]["deps"] if not dep.startswith("mdc/")}
    assert read <= earlier or stage == "download"


def test_every_section_that_changes_results_is_tracked_by_its_stage(graph: dict[str, dict[str, Any]]) -> None:
    for name, stage in graph.items():
        assert name in stage["params"]
        assert not {param.split(".")[0] for param in stage["params"]} & DO_NOT_CHANGE_RESULTS
    assert set(Params.model_fields) == set(graph) | DO_NOT_CHANGE_RESULTS
