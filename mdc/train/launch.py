"""Starts a training: torchrun in this process, one process per rank below it."""

import logging
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from mdc import files
from mdc.config import Params, load_params
from mdc.errors import Terminated, TrainingFailed, UserError
from mdc.train.tracking import close_run
from mdc.train.work import FAILURE, RUN, work_folder

TARGET = "mdc.train"  # the module that each rank runs
SHUTDOWN_S = 60  # for ranks to save a checkpoint after SIGTERM


def pretrain(params: Params | Path, shards: Path, output: Path, runs: Path) -> None:
    """Train on `compute.processes` ranks of this machine and write the checkpoint folder `output`.

    runs: the folder for trainings under way. One with the same data and parameters that was stopped is taken up again.
    Raises UserError for bad input, TrainingFailed when a rank fails, Terminated or KeyboardInterrupt on SIGTERM or
    SIGINT, after the ranks have saved a checkpoint. Ranks end with this process, however it ends.
    """
    params = load_params(params) if isinstance(params, Path) else params
    work = work_folder(params, shards, runs)
    work.mkdir(parents=True, exist_ok=True)
    files.write_json(work / "params.json", params.model_dump())  # JSON is YAML: ranks read what was checked here
    command = ["-m", TARGET, "--launched", "--params", str(work / "params.json")]
    command += ["--shards", str(shards), "--output", str(output), "--work", str(runs)]
    before = {number: signal.getsignal(number) for number in _HANDLED}
    try:
        _torchrun(params.compute.processes, command)
    except ChildFailedError as error:
        _close_tracking(params, work, "FAILED")
        raise _cause(error, work / FAILURE, params.compute.rank_timeout) from None
    except SignalException as stopped:
        _close_tracking(params, work, "KILLED")
        raise KeyboardInterrupt if stopped.sigval == signal.SIGINT else Terminated from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # torchrun sets handlers of its own


def _torchrun(processes: int, command: list[str]) -> None:
    """What the command `torchrun` does, without its log and its own traceback."""
    for name in ("agent.server.api", "multiprocessing.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes)))
    with tempfile.TemporaryDirectory() as logs:
        options = ["--standalone", "--nproc-per-node", str(processes), "--shutdown-timeout", str(SHUTDOWN_S)]
        torchrun.run(torchrun.parse_args([*options, "--log-dir", logs, *command]))


def _cause(error: ChildFailedError, failure: Path, rank_timeout: float) -> Exception:
    """The first failure, from the file where its rank left it; a rank that was killed could leave none."""
    if failure.is_file():
        record: dict[str, Any] = files.read_json(failure)
        if record["mistake"]:
            return UserError(record["message"])
        silent = "imed out" in record["message"]  # gloo's and NCCL's words
        hint = f"; another rank was silent for compute.rank_timeout = {rank_timeout:g} s" if silent else ""
        return TrainingFailed(
            f"rank {record['rank']} on {record['host']} failed: {record['message']} (traceback above){hint}"
        )
    rank, first = error.get_first_failure()
    return TrainingFailed(f"rank {rank} (process {first.pid}) ended with exit code {first.exitcode}: {first.message}")


def _close_tracking(params: Params, work: Path, status: str) -> None:
    """Correct the MLflow run's status where the rank that writes it was killed or could not know why it ended."""
    record = work / RUN
    if record.is_file() and (run := files.read_json(record))["status"] != status:
        close_run(params.tracking, run["run_id"], status)
        files.write_json(record, {**run, "status": status})
