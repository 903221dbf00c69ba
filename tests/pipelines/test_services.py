"""`make services` and `make stop`: a real server, a worker and MLflow on ports of their own."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from source_files import ROOT


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def services(command: str, **variables: object) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment |= {name: str(value) for name, value in variables.items()}
    return subprocess.run(
        [sys.executable, str(ROOT / "infra" / "services.py"), command], capture_output=True, text=True, env=environment
    )


def recorded() -> dict[str, list[float]]:
    record: dict[str, list[float]] = json.loads(Path(".services/processes.json").read_text())
    return record


@pytest.fixture
def project(project: Path) -> Iterator[Path]:
    """The quick project, with this one's flows; its services are ended whatever becomes of the test."""
    for name in ("pipelines", "prefect.yaml"):
        (project / name).symlink_to(ROOT / name)
    yield project
    services("stop")


@pytest.mark.parametrize("variable", ["PREFECT_PORT", "MLFLOW_PORT"])
def test_a_port_in_use_is_named_and_nothing_starts(project: Path, variable: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        ports = {"PREFECT_PORT": free_port(), "MLFLOW_PORT": free_port(), variable: other.getsockname()[1]}
        done = services("start", **ports)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: port {ports[variable]} cannot be used")
    assert f"make services {variable}=" in done.stderr
    assert "Traceback" not in done.stderr
    assert not Path(".services").exists()


@pytest.mark.parametrize("port", ["http", "0", "70000"])
def test_a_port_that_is_none(project: Path, port: str) -> None:
    done = services("start", PREFECT_PORT=port)
    assert (done.returncode, done.stderr) == (
        1,
        f"error: PREFECT_PORT={port} is no port; give a number from 1 to 65535\n",
    )


def test_one_port_for_two_services(project: Path) -> None:
    port = free_port()
    done = services("start", PREFECT_PORT=port, MLFLOW_PORT=port)
    assert done.returncode == 1
    assert done.stderr == (
        f"error: PREFECT_PORT and MLFLOW_PORT are both {port}; give each service a port of its own\n"
    )
    assert not Path(".services").exists()


def test_stopping_what_does_not_run_is_no_error(project: Path) -> None:
    assert services("stop").returncode == 0


def test_a_process_id_that_came_back_is_left_alone(project: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(".services").mkdir()
    Path(".services/processes.json").write_text(json.dumps({"mlflow": [other.pid, 1.0]}))
    assert services("stop").returncode == 0
    assert other.poll() is None
    other.kill()
    other.wait()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_deployed_run_from_start_to_stop(project: Path) -> None:
    ports = {"PREFECT_PORT": free_port(), "MLFLOW_PORT": free_port()}
    started = services("start", **ports)
    assert started.returncode == 0, started.stdout + started.stderr
    processes = [psutil.Process(int(pid)) for pid, _ in recorded().values()]
    api = f"http://127.0.0.1:{ports['PREFECT_PORT']}/api"
    assert f"export PREFECT_API_URL={api}" in started.stdout
    for url in (f"{api}/health", f"http://127.0.0.1:{ports['MLFLOW_PORT']}/"):
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert answer.status == 200
    assert "services run already" in services("start", **ports).stderr

    def prefect(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).parent / "prefect"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PREFECT_API_URL": api})

    # a run with another value, seen to its end
    done = prefect("deployment", "run", "mdc/full-pipeline", "--watch", "--param", 'shard={"seed": 9}')
    assert done.returncode == 0, done.stdout + done.stderr
    assert Path("out/report/result").is_file()
    assert re.search(r"^  seed: 9 +# of the global shuffle", Path("params.yaml").read_text(), re.MULTILINE)
    # one with a value that the form does not have
    refused = prefect("deployment", "run", "mdc/full-pipeline", "--param", 'shard={"sed": 9}')
    assert refused.returncode != 0
    assert "'sed' was unexpected" in " ".join((refused.stdout + refused.stderr).split())
    # one whose values are right each and wrong together: the terminal that watches says why
    refused = prefect("deployment", "run", "mdc/full-pipeline", "--watch", "--param", 'pretrain={"t_min": 1.0}')
    assert refused.returncode != 0
    assert "t_min 1.0 must be below t_max 1.0" in " ".join((refused.stdout + refused.stderr).split())
    # one that is cancelled
    Path("shard.hang").touch()
    created = prefect("deployment", "run", "shard/shard", "--param", 'shard={"seed": 10}')
    run = re.search(r"UUID: ([0-9a-f-]+)", created.stdout)
    assert run is not None
    deadline = time.monotonic() + 120
    while not (Path("shard.pid").is_file() and Path("shard.pid").read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    stage = int(Path("shard.pid").read_text())
    assert prefect("flow-run", "cancel", run[1]).returncode == 0
    deadline = time.monotonic() + 40  # the worker asks for cancelled runs every few seconds
    while psutil.pid_exists(stage):
        assert time.monotonic() < deadline
        time.sleep(0.2)

    stopped = services("stop")
    assert stopped.returncode == 0
    assert not any(process.is_running() for process in processes)
    assert not Path(".services/processes.json").exists()
