"""What may import what, read from the source: data flows one way, and nothing heavy comes before it is needed.

`pipelines -> dvc.yaml -> stages -> {data, train, generate, eval, report} -> objectives -> model`
"""

import subprocess
import sys
from pathlib import Path

import pytest
from source_files import ROOT, imports, sources

LEAVES = {"config", "dist", "doctor", "draws", "errors", "files", "layouts", "presets", "processes", "ranks"}
# the part of mdc/ -> the other parts that it may import; "train.checkpoint" allows one module of a part
ALLOWED: dict[str, set[str]] = {
    "config": {"errors", "files", "layouts", "presets"},
    "dist": {"errors"},
    "doctor": {"config", "data.shards", "data.storage", "errors", "files", "stages"},
    "draws": set(),
    "errors": set(),
    "files": {"errors"},
    "presets": set(),
    "processes": {"errors"},
    "data": LEAVES,
    "layouts": set(),
    "terminal": set(),
    "model": LEAVES,
    "objectives": LEAVES | {"model"},
    "ranks": {"dist", "errors", "files"},
    "generate": LEAVES | {"data", "model", "objectives", "train.checkpoint"},
    "train": LEAVES | {"data", "model", "objectives"},
    "compared": {"api", "eval"},
    "export": LEAVES | {"data", "model", "train.checkpoint"},
    "foreign": LEAVES | {"data", "objectives"},
    "eval": LEAVES | {"data", "generate", "model", "objectives", "train.checkpoint"},
    "report": LEAVES | {"data"},
    "api": LEAVES | {"data", "foreign", "generate", "model", "objectives", "train.checkpoint", "train.tracking"},
    "stages": LEAVES | {"data", "eval", "generate", "report", "train"},
    "sweep": LEAVES | {"eval.measures", "stages", "train.tracking", "train.work"},
    "cli": LEAVES | {"api", "compared", "data", "eval", "export", "report", "stages", "sweep", "terminal"},
    "start": {"cli", "processes"},
    "__init__": {"api"},
}
# modules that only one place may import
ONLY_IN = {"mlflow": {"mdc/train/tracking.py"}, "yaml": set[str](), "ruamel": {"mdc/config.py"}}
NEVER_IN_MDC = {"prefect", "dvc", "pipelines"}
PIPELINES_MAY = {"config", "doctor", "errors", "files", "processes"}
HEAVY = {
    "torch",
    "pandas",
    "pyarrow",
    "numpy",
    "mlflow",
    "prefect",
    "dvc",
    "transformers",
    "timm",
    "faiss",
    "matplotlib",
}


def part_of(path: Path) -> str:
    return path.relative_to(ROOT / "mdc").parts[0].removesuffix(".py")


def own_imports(path: Path) -> set[str]:
    """The parts of mdc/, with their modules where there are any, that a file imports: "errors", "data.loader"."""
    names = {".".join(name.split(".")[1:3]) for name in imports(path) if name.startswith("mdc.")}
    modules = {".".join(file.relative_to(ROOT / "mdc").with_suffix("").parts) for file in sources("mdc")}
    packages = {name.rsplit(".", 1)[0] for name in modules if "." in name}
    return {name if name in modules | packages else name.split(".")[0] for name in names}


def test_every_part_has_its_rule() -> None:
    parts = {part_of(path) for path in sources("mdc")}
    assert parts <= set(ALLOWED), f"say what {sorted(parts - set(ALLOWED))} may import"


@pytest.mark.parametrize("path", sources("mdc"), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_library_imports_in_one_direction(path: Path) -> None:
    part = part_of(path)
    wrong = {
        name
        for name in own_imports(path)
        if name.split(".")[0] != part and not {name, name.split(".")[0]} & ALLOWED[part] and name != "__version__"
    }
    assert not wrong, f"{path.relative_to(ROOT)} imports mdc.{', mdc.'.join(sorted(wrong))}"


@pytest.mark.parametrize("path", sources("mdc"), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_library_knows_no_orchestrator_and_one_place_per_tool(path: Path) -> None:
    place, tops = str(path.relative_to(ROOT)), {name.split(".")[0] for name in imports(path)}
    assert not tops & NEVER_IN_MDC
    assert not {tool for tool, places in ONLY_IN.items() if tool in tops and place not in places}


@pytest.mark.parametrize("path", sources("pipelines"), ids=lambda path: path.name)
def test_flows_leave_the_work_to_dvc(path: Path) -> None:
    assert {name.split(".")[0] for name in own_imports(path)} <= PIPELINES_MAY
    assert not {name for name in imports(path) if name.split(".")[0] in HEAVY - {"prefect"}}


def test_the_rules_bite() -> None:
    """The reader finds imports in functions and under TYPE_CHECKING, relative ones and whole packages."""
    assert "mdc.data.download" in imports(ROOT / "mdc" / "stages.py")
    assert "mdc.api" in imports(ROOT / "mdc" / "__init__.py")
    assert "train" in {name.split(".")[0] for name in own_imports(ROOT / "mdc" / "stages.py")}
    assert "mlflow" in {name.split(".")[0] for name in imports(ROOT / "mdc" / "train" / "tracking.py")}


@pytest.mark.parametrize(
    "code", ["import mdc", "import mdc.config, mdc.stages", "from mdc.cli import app; app(['--help'])"]
)
def test_nothing_heavy_comes_before_it_is_needed(code: str) -> None:
    probe = f"import sys\ntry:\n    {code}\nexcept SystemExit:\n    pass\nprint('modules', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert not HEAVY & {name.split(".")[0] for name in done.stdout.split("modules")[-1].split()}


def test_no_library_calls_home() -> None:
    probe = "import mdc, os; print(os.environ['DO_NOT_TRACK'], os.environ['NO_ALBUMENTATIONS_UPDATE'])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, env={})
    assert done.stdout.split() == ["1", "1"]
