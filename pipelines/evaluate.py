"""Probe the features, score compositional pairs, write captions."""

from typing import Any

from prefect import flow, task

from pipelines._run import changes_to, main, project, run_stage


@task(name="evaluate")
def evaluate_stage() -> None:
    """The same input gives the same bytes, so a failure is no accident: no retries."""
    run_stage("evaluate")


@flow(name="evaluate")
@changes_to("paths", "evaluate", "compute", "tracking")
def evaluate(**changes: Any) -> None:
    """Stage `evaluate` alone."""
    with project(changes):
        evaluate_stage()


if __name__ == "__main__":
    main(evaluate)
