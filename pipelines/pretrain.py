"""Pretrain the encoder, on this machine or wherever `compute.launcher` says."""

from typing import Any

from prefect import flow, task

from pipelines._run import changes_to, main, may_help, project, run_stage


@task(name="pretrain", retries=2, retry_delay_seconds=10, retry_condition_fn=may_help)
def pretrain_stage() -> None:
    """A retry goes on from the newest checkpoint, or follows the cluster's job that is still under way."""
    run_stage("pretrain")


@flow(name="pretrain")
@changes_to("paths", "pretrain", "compute", "tracking")
def pretrain(**changes: Any) -> None:
    """Stage `pretrain` alone."""
    with project(changes):
        pretrain_stage()


if __name__ == "__main__":
    main(pretrain)
