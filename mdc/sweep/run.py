"""Runs the cells of a sweep one after the other: each is a training, its features and its evaluation.

Each run is made of the stages `pretrain`, `extract` and `evaluate`, with folders of its own. Stages that are finished
are not run again, and a training that was killed goes on from its checkpoint.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mdc.config import SweepPlan, SweepRun
from mdc.errors import Terminated, TrainingFailed
from mdc.files import read_manifest
from mdc.processes import only_writer, raise_on_sigterm
from mdc.stages import Folders, run_stage
from mdc.sweep.finished import stages_left
from mdc.sweep.table import FILES, SweepTable, collect, write_tables
from mdc.train.tracking import Group

Say = Callable[[str], None]


def run_sweep(plan: SweepPlan, file: Path, say: Say) -> tuple[SweepTable, list[str]]:
    """Run what is left of a sweep and write its table; returns it, and a line for every training that failed.

    file: the sweep's own, kept with the tracked parent run. say: called with a line of progress. The tables are also
    written when the sweep is told to end. Raises UserError for bad input and while another process runs this sweep.
    """
    for run in plan.runs:
        read_manifest(Folders.of(run.params.paths).shards, made_by="shard")
    failures: list[str] = []
    with raise_on_sigterm(), only_writer(plan.work / "sweep.lock", str(plan.outputs.absolute()), patience_s=0):
        group = Group(plan.runs[0].params.tracking, plan.name, plan.outputs / "run.json")
        with _ended(group, plan, file, failures):
            _run_all(plan, group.run_id, failures, say)
    return collect(plan), failures


@contextmanager
def _ended(group: Group, plan: SweepPlan, file: Path, failures: list[str]) -> Iterator[None]:
    """Write the tables and end the tracked parent run, however the cells end."""
    status = "FAILED"
    try:
        yield
        status = "FAILED" if failures else "FINISHED"
    except (KeyboardInterrupt, Terminated):
        status = "KILLED"
        raise
    finally:
        write_tables(collect(plan), plan.outputs)
        group.finish(status, [*(plan.outputs / name for name in FILES), file])


def _run_all(plan: SweepPlan, parent_run: str, failures: list[str], say: Say) -> None:
    left = [run for run in plan.runs if stages_left(run.params)]
    if len(left) < len(plan.runs):
        say(f"{plan.name}: {len(plan.runs) - len(left)} of {len(plan.runs)} runs were finished before")
    start = time.monotonic()
    for number, run in enumerate(left):
        each_s = (time.monotonic() - start) / max(1, number)
        rest = f", about {each_s * (len(left) - number) / 60:.0f} min left" if number else ""
        say(f"{plan.name}: run {number + 1} of {len(left)}: {run.cell}, seed {run.seed}{rest}")
        try:
            _run(run, parent_run)
        except TrainingFailed as error:
            failures.append(f"{run.cell}, seed {run.seed}: {error}")
            say(f"{failures[-1]}; the other runs go on")


def _run(run: SweepRun, parent_run: str) -> None:
    tracking = run.params.tracking.model_copy(update={"parent_run": parent_run})
    params = run.params.model_copy(update={"tracking": tracking})
    for stage in stages_left(params):
        run_stage(stage, params)
