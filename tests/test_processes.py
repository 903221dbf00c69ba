"""Children end with their parent, however it ends, and an output has one writer."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from mdc.errors import Terminated, UserError
from mdc.processes import end_below, end_children, only_writer, raise_on_sigterm, tied

SLEEP = "import time; time.sleep(600)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.fixture
def running() -> Iterator[list[int]]:
    """Process ids that a test names here are ended after it, whatever became of the test."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def chain(folder: Path) -> str:
    """A process that starts a tied child, which starts a tied grandchild; each writes its process id."""
    grandchild = f"import os; open(r'{folder}/grandchild', 'w').write(str(os.getpid())); {SLEEP}"
    child = (
        f"import os, subprocess, sys; from mdc.processes import tied\n"
        f"open(r'{folder}/child', 'w').write(str(os.getpid()))\n"
        f"subprocess.run(tied([sys.executable, '-c', {grandchild!r}]))"
    )
    return (
        "import subprocess, sys; from mdc.processes import tied\n"
        f"subprocess.run(tied([sys.executable, '-c', {child!r}]), start_new_session=True)"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
def test_a_killed_parent_takes_the_whole_chain_along(tmp_path: Path, running: list[int]) -> None:
    parent = subprocess.Popen([sys.executable, "-c", chain(tmp_path)])
    running.append(parent.pid)
    files = [tmp_path / "child", tmp_path / "grandchild"]
    assert within(30, lambda: all(file.is_file() and file.read_text() for file in files))
    pids = [int(file.read_text()) for file in files]
    running += pids
    assert not any(map(is_gone, pids))
    parent.kill()
    parent.wait()
    assert within(15, lambda: all(map(is_gone, pids)))


def test_a_child_of_a_parent_that_is_gone_already_ends_itself() -> None:
    command = tied([sys.executable, "-c", SLEEP])
    command[3] = "1"  # another parent than this process
    assert subprocess.run(command, timeout=30).returncode == -signal.SIGTERM


def be_told_to_end_twice() -> None:
    with raise_on_sigterm():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # while things are put in order: ignored
            time.sleep(0.1)


def test_sigterm_is_raised_once() -> None:
    with pytest.raises(Terminated):
        be_told_to_end_twice()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_children_that_do_not_listen_are_ended_by_force(running: list[int]) -> None:
    deaf = subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE)
    running.append(deaf.pid)
    assert deaf.stdout is not None
    assert deaf.stdout.readline() == b"up\n"
    end_children(grace_s=0.5)
    assert is_gone(deaf.pid)


def test_a_leader_whose_children_are_ended_ends_itself(tmp_path: Path, running: list[int]) -> None:
    """It sees its child fail, and has time to put its own things in order."""
    script = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}])\n"
        f"open(r'{tmp_path}/child', 'w').write(str(child.pid))\n"
        f"code = child.wait(); open(r'{tmp_path}/order', 'w').write(str(code)); sys.exit(7)"
    )
    leader = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    running.append(leader.pid)
    assert within(30, lambda: (tmp_path / "child").is_file() and bool((tmp_path / "child").read_text()))
    child = int((tmp_path / "child").read_text())
    running.append(child)
    end_below(leader, grace_s=20)
    assert leader.returncode == 7
    assert (tmp_path / "order").read_text() == str(-signal.SIGTERM)
    assert is_gone(child)


def test_a_leader_without_children_is_ended() -> None:
    leader = subprocess.Popen([sys.executable, "-c", SLEEP], start_new_session=True)
    end_below(leader, grace_s=20)
    assert leader.returncode == -signal.SIGTERM


def test_a_second_writer_is_told_who_the_first_is(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from mdc.processes import only_writer\n"
        "with only_writer(Path('x.lock'), 'data/shards', 0): print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script]
    first = subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert first.stdout is not None
    assert first.stdout.readline() == b"held\n"
    try:
        with (
            pytest.raises(UserError, match=f"data/shards is being written by process {first.pid} .*end it"),
            only_writer(tmp_path / "x.lock", "data/shards", patience_s=0),
        ):
            pass
        with (
            pytest.raises(UserError, match=f"process {first.pid} is writing data/shards and uses {tmp_path} as well"),
            only_writer(tmp_path / "x.lock", "other/shards", patience_s=0),
        ):
            pass
    finally:
        first.kill()
        first.wait()
    with only_writer(tmp_path / "x.lock", "data/shards", patience_s=0):  # the killed one holds nothing
        assert (tmp_path / "x.lock").read_text() == f"{os.getpid()} data/shards\n"


def test_a_writer_may_wait_for_one_that_is_ending(tmp_path: Path) -> None:
    held, order = threading.Event(), []

    def first() -> None:
        with only_writer(tmp_path / "x.lock", "x", patience_s=0):
            held.set()
            time.sleep(0.5)
            order.append("first ended")

    thread = threading.Thread(target=first)
    thread.start()
    held.wait()
    with only_writer(tmp_path / "x.lock", "x", patience_s=30):
        order.append("second began")
    thread.join()
    assert order == ["first ended", "second began"]
