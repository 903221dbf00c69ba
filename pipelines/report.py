"""Write the report."""

from typing import Any

from prefect import flow, task

from pipelines._run import changes_to, main, project, run_stage


@task(name="report")
def report_stage() -> None:
    """The same input gives the same bytes, so a failure is no accident: no retries."""
    run_stage("report")


@flow(name="report")
@changes_to("paths", "report", "compute", "tracking")
def report(**changes: Any) -> None:
    """Stage `report` alone."""
    with project(changes):
        report_stage()


if __name__ == "__main__":
    main(report)
