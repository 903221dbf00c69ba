"""Tokenise the captions, filter them by length, and split."""

from typing import Any

from prefect import flow, task

from pipelines._run import changes_to, main, project, run_stage


@task(name="caption")
def caption_stage() -> None:
    """The same input gives the same bytes, so a failure is no accident: no retries."""
    run_stage("caption")


@flow(name="caption")
@changes_to("paths", "caption", "compute")
def caption(**changes: Any) -> None:
    """Stage `caption` alone."""
    with project(changes):
        caption_stage()


if __name__ == "__main__":
    main(caption)
