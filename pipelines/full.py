"""The whole pipeline: flow `mdc`, deployed as `full-pipeline`. Stages that are up to date are skipped by DVC."""

from typing import Any

from prefect import flow

from pipelines._run import changes_to, main, project
from pipelines.caption import caption_stage
from pipelines.download import download_stage
from pipelines.evaluate import evaluate_stage
from pipelines.extract import extract_stage
from pipelines.pretrain import pretrain_stage
from pipelines.report import report_stage
from pipelines.shard import shard_stage


@flow(name="mdc")
@changes_to()
def full(**changes: Any) -> None:
    """From a list of URLs to a report. Each parameter is a section of params.yaml; values given replace the file's."""
    with project(changes):
        download_stage()
        caption_stage()
        shard_stage()
        pretrain_stage()
        extract_stage()
        evaluate_stage()
        report_stage()


if __name__ == "__main__":
    main(full)
