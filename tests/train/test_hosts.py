"""Two hosts that train together, made of network namespaces: own addresses, a cable between them, shared files."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from mdc.config import Params
from mdc.errors import TrainingFailed, UserError
from mdc.train import hosts, launch
from mdc.train.checkpoint import step_folders
from mdc.train.hosts import MeetingPlace
from mdc.train.work import work_folder

MakeParams = Callable[..., Params]
ADDRESSES = {"first": "10.199.7.1", "second": "10.199.7.2"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def within(seconds: float, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# -- the meeting place ------------------------------------------------------------------------------------------------


def test_hosts_that_differ_are_refused_by_name() -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    first, second = MeetingPlace(endpoint, 10), MeetingPlace(endpoint, 10)
    first.enter({"code": "a", "processes": 8})
    second._open = lambda: None  # type: ignore[assignment,method-assign,return-value] -- the other host has no such address
    with pytest.raises(UserError, match=r"code is b here and a there; the source of mdc is another"):
        second.enter({"code": "b", "processes": 8})
    with pytest.raises(UserError, match=r"processes is 4 here and 8 there; set compute.processes alike"):
        second.enter({"code": "a", "processes": 4})
    assert second.enter({"code": "a", "processes": 8}) == 0
    # the next try starts anew: code may have been mended in the meantime, on all hosts
    second.note_failed(0)
    assert second.enter({"code": "b"}) == first.enter({"code": "b"}) == 1


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} of 127.0.0.1 is in use"):
            MeetingPlace(f"127.0.0.1:{port}", 10).enter({})


def test_a_server_of_another_kind_does_not_hold_a_host_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "ANSWER_S", 1)
    monkeypatch.setattr(hosts, "interfaces", dict)  # the server is another host's
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(TrainingFailed, match=r"is no store of torch\.distributed"):
            MeetingPlace(f"127.0.0.1:{other.getsockname()[1]}", 0.5).enter({})


@pytest.mark.parametrize(("host", "words"), [("no-such-host.invalid", "known|resolution"), ("127.0.0.2", "refused")])
def test_a_host_that_is_not_there_is_waited_for_and_then_told(host: str, words: str) -> None:
    endpoint = f"{host}:{free_port()}"
    with pytest.raises(TrainingFailed, match=rf"keeps a meeting at {endpoint}: .*({words}).*rendezvous_timeout"):
        MeetingPlace(endpoint, 0.5).enter({})


def test_a_host_that_comes_late_is_found(caplog: pytest.LogCaptureFixture) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    late, first = MeetingPlace(endpoint, 60), MeetingPlace(endpoint, 60)
    late._open = lambda: None  # type: ignore[assignment,method-assign,return-value]
    entering = threading.Thread(target=late.enter, args=({"code": "a"},))
    entering.start()
    within(30, lambda: "waiting for the host at" in caplog.text)
    first.enter({"code": "a"})
    entering.join(30)
    assert not entering.is_alive()


def test_hosts_that_do_not_come_are_told_with_what_to_run_there(
    tmp_path: Path, shards: Path, small_params: MakeParams, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    compute = {"launcher": "hosts", "hosts": 2, "endpoint": endpoint, "rendezvous_timeout": 3.0, "rank_timeout": 1.0}
    with pytest.raises(TrainingFailed) as caught:
        launch.pretrain(small_params(compute=compute), shards, tmp_path / "model", tmp_path / "runs")
    told = str(caught.value)
    assert told.startswith("1 of compute.hosts = 2 hosts have met within compute.rendezvous_timeout = 3 s: ")
    assert f"{socket.gethostname()} (" in told
    assert "run `mdc worker` on each of the others" in told
    assert "waiting for the other hosts, 2 in all: run `mdc worker` there" in caplog.text


def test_a_host_that_comes_twice_is_one() -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    first, again = MeetingPlace(endpoint, 10), MeetingPlace(endpoint, 10)
    for place in (first, again):
        place.enter({})
        again._open = lambda: first.own  # type: ignore[assignment,method-assign,return-value] -- there is one store
    assert first.came(0) == again.came(0)
    assert len(first.came(0)) == 1


@pytest.mark.parametrize(
    ("addresses", "taken"),
    [
        ({"127.0.0.1": "lo", "::1": "lo", "fe80::1": "eth0", "10.0.0.5": "eth0"}, "10.0.0.5"),
        ({"127.0.0.1": "lo", "::1": "lo"}, "127.0.0.1"),
    ],
)
def test_the_first_host_is_named_by_an_address_that_others_reach(
    addresses: dict[str, str], taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "interfaces", lambda: addresses)
    place = MeetingPlace(f"127.0.0.1:{free_port()}", 10)
    place.enter({})
    assert place.address == taken


# -- hosts of network namespaces --------------------------------------------------------------------------------------


def command(*arguments: str) -> None:
    subprocess.run(arguments, check=True)


@pytest.fixture
def namespaces() -> Iterator[dict[str, str]]:
    """By host, its namespace. Each has one end of a cable; what still runs in them is ended, and they are removed."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces need root and `ip` (apt-get install iproute2)")
    made = {host: f"mdc-{host}-{os.getpid()}" for host in ADDRESSES}
    try:
        for name in made.values():
            command("ip", "netns", "add", name)
        first, second = made.values()
        command(
            "ip", "link", "add", "cable0", "netns", first, "type", "veth", "peer", "name", "cable0", "netns", second
        )
        for host, name in made.items():
            command("ip", "-n", name, "address", "add", f"{ADDRESSES[host]}/24", "dev", "cable0")
            for device in ("lo", "cable0"):
                command("ip", "-n", name, "link", "set", device, "up")
        yield made
    finally:
        for name in made.values():
            kill_host(name)
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def kill_host(namespace: str) -> None:
    """End everything that runs on the host, at once and unasked."""
    pids = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True).stdout.split()
    running = [psutil.Process(int(pid)) for pid in pids if psutil.pid_exists(int(pid))]
    for process in running:
        process.send_signal(signal.SIGKILL)
    psutil.wait_procs(running, timeout=10)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lost", ["first", "second"])
def test_a_host_that_is_lost_and_comes_back(
    tmp_path: Path,
    shards: Path,
    small_params: MakeParams,
    namespaces: dict[str, str],
    lost: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other one notices, waits, and both go on from the newest checkpoint; nobody is asked."""
    monkeypatch.chdir(tmp_path)
    options = {"steps": 1000, "checkpoint_every": 100, "keep_checkpoints": 3, "validate_every": 500, "log_every": 50}
    shutil.copytree(shards, "data/shards")
    compute = {"launcher": "hosts", "hosts": 2, "endpoint": f"{ADDRESSES['first']}:29500", "workers": 1}
    params = small_params(**options, compute=compute)
    Path("params.yaml").write_text(params.model_dump_json())
    commands = {"first": ("stage", "pretrain"), "second": ("worker",)}

    def start(host: str) -> subprocess.Popen[bytes]:
        with Path(f"{host}.log").open("ab") as log:
            line = ["ip", "netns", "exec", namespaces[host], sys.executable, "-m", "mdc.cli", *commands[host]]
            return subprocess.Popen(line, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})

    running = {host: start(host) for host in commands}
    work = work_folder(params, Path("data/shards"), Path("runs"))
    within(180, lambda: step_folders(work))
    kill_host(namespaces[lost])
    running[lost].wait(10)
    kept = step_folders(work)[0].name
    running[lost] = start(lost)
    logs = {host: Path(f"{host}.log") for host in commands}
    for host, process in running.items():
        assert process.wait(300) == 0, (host, logs[host].read_text()[-3000:])
    said = logs["first"].read_text() + logs["second"].read_text()
    assert int(kept.removeprefix("step-")) < 1000, "the host was lost in mid-training"
    assert "taken up again at step" in said
    assert "2 x cpu" in said
    # as many ranks, since the order of sums over more or fewer is another, which 1,000 updates make seen
    alone = small_params(**options, compute={"processes": 2})
    launch.pretrain(alone, Path("data/shards"), Path("undisturbed"), Path("other-runs"))
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (Path("outputs/model"), Path("undisturbed")))
    for name, weights in ours.items():
        torch.testing.assert_close(weights, theirs[name], atol=1e-6, rtol=0)
