"""Starts a training where `compute.launcher` says: on this machine, on several hosts, or as a job of a cluster.

On every host torchrun runs in the launcher's own process, with one process per rank below it. A try that failed is
followed by another one from the newest checkpoint, unless the failure would come again.
"""

import logging
import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousTimeoutError

from mdc import dist, files, ranks
from mdc.config import Params, load_params
from mdc.errors import Terminated, TrainingFailed, UserError
from mdc.train.checkpoint import step_folders
from mdc.train.hosts import MeetingPlace, in_common
from mdc.train.jobs import JOBS, run_as_job
from mdc.train.tracking import close_run
from mdc.train.work import FAILURE, RUN, work_folder

log = logging.getLogger(__name__)

TARGET = "mdc.train"  # the module that each rank runs
MEETINGS = 10  # in a row that may break off before they count as a failure
REPEATING = ("FloatingPointError", "OutOfMemoryError")  # the same batch would do it again


class MeetingLost(TrainingFailed):
    """The hosts have lost sight of one another; the ranks here have ended."""


def pretrain(params: Params | Path, shards: Path, output: Path, runs: Path) -> None:
    """Train where `compute.launcher` says and write the checkpoint folder `output`.

    runs: the folder for trainings under way. One with the same data and parameters that was stopped is taken up again,
    and a job of a cluster that is still under way is followed rather than started twice.
    Raises UserError for bad input, TrainingFailed when a rank fails, Terminated or KeyboardInterrupt on SIGTERM or
    SIGINT, after the ranks have saved a checkpoint. Ranks end with this process, however it ends; jobs of a cluster
    end with it only where it is told to end.
    """
    params = load_params(params) if isinstance(params, Path) else params
    if params.compute.launcher in JOBS:
        work = work_folder(params, shards, runs)
        run_as_job(params, work, output, partial(_close_tracking, params, work))
    else:
        take_part(params, shards, output, runs, params.compute.endpoint if params.compute.launcher == "hosts" else "")


def take_part(params: Params, shards: Path, output: Path, runs: Path, endpoint: str) -> None:
    """Run the ranks of this host until the training is done, as `pretrain` does.

    endpoint: HOST:PORT where the hosts meet; "" for one host alone.
    """
    dist.pick_device(params.compute.device)  # a mistake that every rank would make
    work = work_folder(params, shards, runs)
    place = MeetingPlace(endpoint, params.compute.rendezvous_timeout) if endpoint else None
    before = _written(output)
    with tempfile.TemporaryDirectory() as scratch:
        # JSON is YAML: ranks read what was checked here
        files.write_json(Path(scratch) / "params.json", params.model_dump())
        command = ["--log-dir", scratch, "-m", TARGET, "--launched", "--params", f"{scratch}/params.json"]
        command += ["--shards", str(shards), "--output", str(output), "--work", str(runs)]
        _persevere(params, work, lambda: _try(params, work, command, place), lambda: _written(output) != before)


def _written(output: Path) -> int:
    """When the output was finished, 0 if it is not. Hosts read this of one file, so that clocks do not matter."""
    manifest = output / files.MANIFEST
    return manifest.stat().st_mtime_ns if manifest.is_file() else 0


def _persevere(params: Params, work: Path, attempt: Callable[[], Exception | None], done: Callable[[], bool]) -> None:
    """Try until there is a result, which may come about on another host, for as long as `compute.restarts` lets."""
    failures, lost, saved = 0, 0, _newest_step(work)
    while (cause := attempt()) is not None and not done():
        if isinstance(cause, MeetingLost) and lost < MEETINGS:
            lost += 1
            log.warning("%s; going back to the meeting place", cause)
            continue
        lost, newest = 0, _newest_step(work)
        failures = 1 if newest > saved else failures + 1
        saved = newest
        if _would_repeat(cause) or failures > params.compute.restarts:
            _close_tracking(params, work, "FAILED")
            raise cause
        start = f"the checkpoint of step {newest}" if newest else "the start"
        log.warning("%s; again from %s (%d of %d)", cause, start, failures, params.compute.restarts)


def _would_repeat(cause: Exception) -> bool:
    return isinstance(cause, UserError) or any(f": {kind}:" in str(cause) for kind in REPEATING)


def _newest_step(work: Path) -> int:
    return max((int(folder.name.removeprefix("step-")) for folder in step_folders(work)), default=0)


def _try(params: Params, work: Path, command: Sequence[str], place: MeetingPlace | None) -> Exception | None:
    """Train once; returns why it failed, None when it is done.

    Raises what no further try can mend: hosts that differ or do not come, and being told to end.
    """
    number, options = 0, ["--standalone"]
    if place is not None:
        number = place.enter(in_common(params, work))
        if params.compute.launcher == "hosts" and place.own is not None and not number:
            log.warning("waiting for the other hosts, %d in all: run `mdc worker` there", params.compute.hosts)
        if place.interface:  # gloo would take the one that this host's name stands for, often the loopback
            os.environ.setdefault("GLOO_SOCKET_IFNAME", place.interface)
        options = ["--nnodes", str(params.compute.hosts), "--rdzv-backend", "c10d", "--rdzv-endpoint", place.endpoint]
        options += ["--rdzv-id", f"{work.name}-{number}", "--local-addr", place.address]
        options += ["--rdzv-conf", f"is_host=0,join_timeout={params.compute.rendezvous_timeout:.0f}"]
    if place is None or place.own is not None:  # one host does it for all
        (work / FAILURE).unlink(missing_ok=True)
    cause: Exception
    try:
        ranks.torchrun(params.compute.processes, [*options, *command])
        return None
    except ChildFailedError as error:
        cause = ranks.cause(error, work / FAILURE, params.compute.rank_timeout)
    except RendezvousTimeoutError:
        _close_tracking(params, work, "FAILED")
        raise TrainingFailed(_too_few(params, place, number)) from None
    except (RendezvousError, DistError) as error:
        cause = (MeetingLost if place is not None else TrainingFailed)(
            f"the meeting of the hosts broke off ({type(error).__name__}: {str(error).splitlines()[0]})"
        )
        recorded = ranks.recorded(work / FAILURE, params.compute.rank_timeout)
        if recorded is not None and _would_repeat(recorded):  # which is why the others have left
            cause = recorded
    except SignalException as stopped:
        _close_tracking(params, work, "KILLED")
        raise KeyboardInterrupt if stopped.sigval == signal.SIGINT else Terminated from None
    if place is not None:
        place.note_failed(number)
    return cause


def _too_few(params: Params, place: MeetingPlace | None, number: int) -> str:
    """Why a try did not begin, with those hosts that this one has seen come."""
    compute, came = params.compute, place.came(number) if place is not None else []
    few = f"{len(came)} of" if 0 < len(came) < compute.hosts else "fewer than"
    by_hand = "run `mdc worker` on each of the others in that time; " if compute.launcher == "hosts" else ""
    return (
        f"{few} compute.hosts = {compute.hosts} hosts have met within compute.rendezvous_timeout = "
        f"{compute.rendezvous_timeout:g} s{': ' * bool(came)}{', '.join(came)}; {by_hand}the output on each of them "
        "says more"
    )


def _close_tracking(params: Params, work: Path, status: str) -> None:
    """Correct the MLflow run's status where the rank that writes it was killed or could not know why it ended."""
    record = work / RUN
    if record.is_file() and (run := files.read_json(record))["status"] != status:
        close_run(params.tracking, run["run_id"], status)
        files.write_json(record, {**run, "status": status})
