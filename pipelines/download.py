"""Fetch the pictures of a URL list and store them at training size."""

from typing import Any

from prefect import flow, task

from pipelines._run import changes_to, main, may_help, project, run_stage


@task(name="download", retries=2, retry_delay_seconds=30, retry_condition_fn=may_help)
def download_stage() -> None:
    """A retry asks only for what is missing: rows that failed for a passing reason."""
    run_stage("download")


@flow(name="download")
@changes_to("paths", "download", "compute")
def download(**changes: Any) -> None:
    """Stage `download` alone."""
    with project(changes):
        download_stage()


if __name__ == "__main__":
    main(download)
