"""Join pictures and tokens into the final shards."""

from typing import Any

from prefect import flow, task

from pipelines._run import changes_to, main, project, run_stage


@task(name="shard")
def shard_stage() -> None:
    """The same input gives the same bytes, so a failure is no accident: no retries."""
    run_stage("shard")


@flow(name="shard")
@changes_to("paths", "shard", "compute")
def shard(**changes: Any) -> None:
    """Stage `shard` alone."""
    with project(changes):
        shard_stage()


if __name__ == "__main__":
    main(shard)
