"""Reads this project's own source: which files there are, and what each imports."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@cache
def imports(path: Path) -> frozenset[str]:
    """Every module that a file imports anywhere, functions included, by full name."""
    found = set()
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            found |= {".".join([*base, alias.name]) for alias in node.names} | {".".join(base)}
    return frozenset(found)
