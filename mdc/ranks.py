"""Ranks on this host: torchrun runs in the calling process, with one process per rank below it.

The first failure of any rank is left in a file, since it is the cause and later ones follow from it; the caller raises
it as its own.
"""

import contextlib
import json
import logging
import os
import signal
import socket
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from mdc import dist, files
from mdc.errors import Terminated, TrainingFailed, UserError

log = logging.getLogger(__name__)

SHUTDOWN_S = 60  # for ranks to save a checkpoint after SIGTERM
_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # torchrun sets handlers of its own


def torchrun(processes: int, arguments: Sequence[str]) -> None:
    """What the command `torchrun` does, without its log and its own traceback."""
    for name in ("agent.server.api", "multiprocessing.api", "rendezvous.dynamic_rendezvous"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes)))
    before = {number: signal.getsignal(number) for number in _HANDLED}
    try:
        options = ["--nproc-per-node", str(processes), "--shutdown-timeout", str(SHUTDOWN_S)]
        run.run(run.parse_args([*options, *arguments]))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_module(module: str, arguments: Sequence[str], processes: int, failure: Path, rank_timeout: float) -> None:
    """Run `python -m module` as ranks on this host alone, to their end.

    failure: where they leave the first failure, see `failures_recorded`. Raises that failure, as `cause` says, and
    Terminated or KeyboardInterrupt on SIGTERM or SIGINT, after the ranks have ended.
    """
    with tempfile.TemporaryDirectory() as scratch:
        try:
            torchrun(processes, ["--standalone", "--log-dir", scratch, "-m", module, *arguments])
        except ChildFailedError as error:
            raise cause(error, failure, rank_timeout) from None
        except SignalException as stopped:
            raise KeyboardInterrupt if stopped.sigval == signal.SIGINT else Terminated from None


@contextlib.contextmanager
def failures_recorded(failure: Path, launched: bool) -> Iterator[None]:
    """Leave the first failure of any rank in a file: it is the cause, and later ones follow from it.

    launched: a launcher reads the file and tells a user's mistake, so that it need not be told here as well.
    """
    try:
        yield
    except Exception as error:
        mistake = isinstance(error, UserError)
        record = {
            "rank": dist.rank(),
            "host": socket.gethostname(),
            "message": str(error) if mistake else f"{type(error).__name__}: {error}",
            "mistake": mistake,
        }
        try:
            with failure.open("x", encoding="utf-8") as file:
                json.dump(record, file)
        except FileExistsError:
            raise SystemExit(1) from None
        except OSError as full:
            failure.unlink(missing_ok=True)  # rather than half a record
            log.error("%s could not be written: %s", failure, full)
            raise error from None
        if mistake and launched:
            raise SystemExit(1) from None
        raise


def recorded(failure: Path, rank_timeout: float) -> Exception | None:
    """The first failure, from the file where its rank left it."""
    if not failure.is_file():
        return None
    record: dict[str, Any] = files.read_json(failure)
    if record["mistake"]:
        return UserError(record["message"])
    silent = "imed out" in record["message"]  # gloo's and NCCL's words
    hint = f"; another rank was silent for compute.rank_timeout = {rank_timeout:g} s" if silent else ""
    return TrainingFailed(
        f"rank {record['rank']} on {record['host']} failed: {record['message']} (traceback above){hint}"
    )


def cause(error: ChildFailedError, failure: Path, rank_timeout: float) -> Exception:
    """The first failure; a rank that was killed could leave no record.

    Raises KeyboardInterrupt where the ranks have agreed to end on Ctrl-C, which another host may have received.
    """
    known = recorded(failure, rank_timeout)
    killed = [(rank, failed) for rank, failed in error.failures.items() if failed.exitcode == -signal.SIGKILL]
    if killed and not isinstance(known, UserError):  # the others have only lost the connection to it
        rank, first = killed[0]
        return TrainingFailed(
            f"rank {rank} (process {first.pid}) was killed by SIGKILL, as the kernel does where memory has run out"
        )
    if known is not None:
        return known
    rank, first = error.get_first_failure()
    if first.exitcode == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if first.exitcode == 128 + signal.SIGTERM:
        return TrainingFailed("the ranks were told to end, here or on another host; what they have saved is kept")
    return TrainingFailed(f"rank {rank} (process {first.pid}) ended with exit code {first.exitcode}: {first.message}")
