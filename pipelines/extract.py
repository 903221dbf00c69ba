"""Extract frozen features once, and index them."""

from typing import Any

from prefect import flow, task

from pipelines._run import changes_to, main, project, run_stage


@task(name="extract")
def extract_stage() -> None:
    """The same input gives the same bytes, so a failure is no accident: no retries."""
    run_stage("extract")


@flow(name="extract")
@changes_to("paths", "extract", "compute")
def extract(**changes: Any) -> None:
    """Stage `extract` alone."""
    with project(changes):
        extract_stage()


if __name__ == "__main__":
    main(extract)
