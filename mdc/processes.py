"""Child processes that end when their parent does, however it ends, and one writer for each output.

A parent killed by SIGKILL cannot clean up, so the wish to end with it is left with the kernel: `tied` starts a command
that gets SIGTERM when its parent is gone, and `end_with_parent` asks the same for the running process. A command that
is tied all the way down (flow, dvc, stage, torchrun, ranks) leaves nothing behind. Where there is no such call (not
Linux), only the orderly ends work.
"""

import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil

from mdc.errors import Terminated, UserError

_PR_SET_PDEATHSIG = 1  # prctl(2)


def end_with_parent(parent: int | None = None) -> None:
    """Have the kernel send SIGTERM to this process when its parent ends.

    parent: the process id that the parent must have; another one means that it has ended already.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


@cache
def end_when_orphaned(every_s: float = 1.0, parent: int | None = None) -> None:
    """As `end_with_parent`, for a process that a thread of its parent may have started; once per process.

    The kernel's signal comes when that thread ends, not the parent. So a thread here looks who the parent is.
    parent: the process id that the parent must have, where it may have ended already.
    """
    expected = os.getppid() if parent is None else parent

    def watch() -> None:
        while os.getppid() == expected:
            time.sleep(every_s)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def tied(command: Sequence[str]) -> list[str]:
    """The command line that runs `command`, and ends it when the calling process ends."""
    return [sys.executable, "-m", "mdc.processes", str(os.getpid()), *command]


@contextmanager
def raise_on_sigterm() -> Iterator[None]:
    """Turn the first SIGTERM into `Terminated`; later ones are ignored while things are put in order."""

    def stop(_number: int, _frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def on_ctrl_c(act: Any) -> None:
    """Have Ctrl-C do that, unless this process was started deaf to it, as a script does in the background.

    act: a handler of signals, or one of those that the module `signal` names.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, act)


def end_on_ctrl_c() -> None:
    """Have Ctrl-C end this process at once and without a traceback, for the seconds in which libraries are loaded."""
    on_ctrl_c(lambda *_: os._exit(128 + signal.SIGINT))


@contextmanager
def deaf_children() -> Iterator[None]:
    """Processes that are started meanwhile do not hear Ctrl-C, which a terminal sends to all.

    It is for the process that started them to end them: one that still starts would die with a traceback, and a server
    would be gone while its users still need it.
    """
    resource_tracker.ensure_running()  # which would be started with the first of them, and let Ctrl-C through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _reap(processes: list[psutil.Process], grace_s: float) -> None:
    """Wait `grace_s` seconds for processes that were asked to end; end what is left, and all below it, by force."""
    _, left = psutil.wait_procs(processes, timeout=grace_s)
    for process in list(left):
        with suppress(psutil.NoSuchProcess):
            left += process.children(recursive=True)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=5)


def _is_pythons_own(process: psutil.Process) -> bool:
    """A helper that multiprocessing or joblib started: it ends with its parent, and if killed comes back noisily.

    What a fork server has forked looks like it, and is none.
    """
    with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        arguments = process.cmdline()
        if any("multiprocessing.forkserver" in argument for argument in arguments):
            return process.ppid() == os.getpid()
        return any("resource_tracker" in argument for argument in arguments)
    return False


def end_children(grace_s: float) -> None:
    """End every process below this one: ask, wait `grace_s` seconds, then force."""
    children = [child for child in psutil.Process().children(recursive=True) if not _is_pythons_own(child)]
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.terminate()
    _reap(children, grace_s)


def end_below(leader: subprocess.Popen[bytes], grace_s: float) -> None:
    """Ask the processes that `leader` started to end, so that it sees them fail and puts its own things in order.

    One without processes is asked itself. All that is left after `grace_s` seconds is ended by force.
    """
    deadline = time.monotonic() + grace_s
    below: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(leader.pid)
        below = process.children(recursive=True)
        for asked in process.children() or [process]:
            with suppress(psutil.NoSuchProcess):
                asked.terminate()
    with suppress(subprocess.TimeoutExpired):
        leader.wait(grace_s)
    _reap(below, max(0.0, deadline - time.monotonic()))
    leader.kill()
    leader.wait()


def is_first_rank() -> bool:
    """Whether this process is not one that torchrun started beside a first one."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def only_writer(lock: Path, what: str, patience_s: float) -> Iterator[None]:
    """Hold `lock` while writing `what`; a second writer gets a UserError that names the first one's process.

    what: the same for two writers only where they write the same, so an absolute path.
    patience_s: seconds to wait, since the stage of a `dvc repro` that was killed needs a moment to end.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a+", encoding="utf-8") as file:
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    file.seek(0)
                    raise _held(lock, what, file.read()) from None
                time.sleep(0.1)
        file.truncate(0)
        file.write(f"{os.getpid()} {what}\n")
        file.flush()
        yield


def _held(lock: Path, what: str, holder: str) -> UserError:
    """holder: what is in the lock file; nothing for a moment after it was taken."""
    pid, _, theirs = holder.strip().partition(" ")
    if theirs in ("", what):
        return UserError(
            f"{what} is being written by process {pid or '?'} (lock {lock}); wait for it, or end it and run again"
        )
    return UserError(
        f"process {pid} is writing {theirs} and uses {lock.parent.absolute()} as well (lock {lock}); wait for it, or "
        "set paths.runs to a folder that nothing else uses"
    )


if __name__ == "__main__":  # see `tied`
    end_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
