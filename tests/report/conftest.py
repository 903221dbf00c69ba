"""Runs to report on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from finished_run import Pair, World, shapes


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A run that has everything. Tests read it and change nothing."""
    return World(tmp_path_factory.mktemp("run"), shapes())


@pytest.fixture
def make_world(tmp_path: Path) -> Callable[..., World]:
    """Make a run of one's own, to take parts away from."""

    def make(pairs: list[Pair] | None = None, **changes: Any) -> World:
        return World(tmp_path / "run", pairs or shapes(), changes)

    return make
