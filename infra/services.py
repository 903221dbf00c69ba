"""Prefect server, worker and MLflow on localhost: `python infra/services.py start` or `stop`.

`start` refuses before it starts anything if a port is taken, and ends what it started if something does not become
healthy. `stop` ends just the processes that `start` recorded under .services/. Ports: PREFECT_PORT, MLFLOW_PORT.
"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil

from mdc.config import load_params
from mdc.doctor import PORTS, check_backport
from mdc.errors import UserError

FOLDER = Path(".services")
RECORD = FOLDER / "processes.json"
BIN = Path(sys.executable).parent
HOST = "127.0.0.1"
HEALTHY_WITHIN_S = 180
GRACE_S = 30


def main() -> None:
    commands = {"start": start, "stop": stop}
    if len(sys.argv) != 2 or sys.argv[1] not in commands:
        sys.exit(f"usage: python {sys.argv[0]} {'|'.join(commands)}")
    try:
        commands[sys.argv[1]]()
    except UserError as error:
        sys.exit(f"error: {error}")


def start() -> None:
    """Start everything, wait until it answers, register the deployments, and say where it is."""
    check_backport()
    if running := _recorded():
        raise UserError(f"services run already ({', '.join(running)}); `make stop` ends them")
    ports = {variable: _free_port(variable) for variable in PORTS}
    if len(set(ports.values())) < len(ports):
        raise UserError(f"{' and '.join(ports)} are both {ports['MLFLOW_PORT']}; give each service a port of its own")
    api = f"http://{HOST}:{ports['PREFECT_PORT']}/api"
    os.environ["PREFECT_API_URL"] = api
    FOLDER.mkdir(exist_ok=True)
    try:
        _run("prefect-server", [BIN / "prefect", "server", "start", "--host", HOST, "--port", ports["PREFECT_PORT"]])
        _run("mlflow", _mlflow_command(ports["MLFLOW_PORT"]))
        _wait("prefect-server", f"{api}/health")
        _wait("mlflow", f"http://{HOST}:{ports['MLFLOW_PORT']}/health")
        _call([BIN / "prefect", "work-pool", "create", "mdc", "--type", "process", "--overwrite"])
        _call([BIN / "prefect", "work-pool", "set-concurrency-limit", "mdc", "1"])
        _call([BIN / "prefect", "--no-prompt", "deploy", "--all"])
        _run("worker", [BIN / "prefect", "worker", "start", "--pool", "mdc", "--type", "process", "--limit", "1"])
    except BaseException:
        stop()
        raise
    # MLflow opens on its pages for chats unless it is told
    runs = f"http://{HOST}:{ports['MLFLOW_PORT']}/#/experiments?workflowType=machine_learning"
    shown = {"api": api, "prefect": api.removesuffix("/api"), "mlflow": runs}
    print(READY.format(**shown))


READY = """
Prefect   {prefect}
MLflow    {mlflow}
Logs      .services/*.log

Run the pipeline on the worker, and watch it:
  . .venv/bin/activate
  export PREFECT_API_URL={api}
  prefect deployment run mdc/full-pipeline --watch
  prefect deployment run mdc/full-pipeline --watch --param 'pretrain={{"lr": 5e-4}}'

End these services with `make stop`.
"""


def stop() -> None:
    """End the recorded processes and all below them: the worker first, so that its runs end in good order."""
    for name, process in reversed(_recorded().items()):
        tree = [process, *process.children(recursive=True)]
        process.terminate()
        _, left = psutil.wait_procs(tree, timeout=GRACE_S)
        for straggler in left:
            straggler.kill()
        psutil.wait_procs(left, timeout=5)
        print(f"{name} ended")
    RECORD.unlink(missing_ok=True)


def _free_port(variable: str) -> str:
    port = os.environ.get(variable, str(PORTS[variable]))
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"{variable}={port} is no port; give a number from 1 to 65535")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, int(port)))
        except OSError as error:
            raise UserError(
                f"port {port} cannot be used ({error.strerror}); choose another with `make services {variable}=...`; "
                "nothing was started"
            ) from None
    return port


def _mlflow_command(port: str) -> list[str | Path]:
    """The UI over the same file that a training without a server writes."""
    uri = load_params().tracking.uri
    if not uri.startswith("sqlite:"):
        raise UserError(f"params.yaml: tracking.uri = {uri!r} is a server already; only sqlite:///FILE is served here")
    return [BIN / "mlflow", "server", "--backend-store-uri", uri, "--artifacts-destination", "mlartifacts",
            "--host", HOST, "--port", port, "--workers", "1"]  # fmt: skip


def _run(name: str, command: list[str | Path]) -> None:
    """Start a process in a session of its own and record it, with its start time, since process ids come back."""
    with (FOLDER / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            [str(part) for part in command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    record = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    record[name] = [process.pid, psutil.Process(process.pid).create_time()]
    RECORD.write_text(json.dumps(record))
    print(f"{name} starts (process {process.pid})", flush=True)


def _recorded() -> dict[str, psutil.Process]:
    """The recorded processes that are alive, in the order they were started."""
    record = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    alive = {}
    for name, (pid, started) in record.items():
        if psutil.pid_exists(pid) and psutil.Process(pid).create_time() == started:
            alive[name] = psutil.Process(pid)
    return alive


def _wait(name: str, url: str) -> None:
    """Return when the URL answers; fail when its process is gone or the time is up."""
    deadline = time.monotonic() + HEALTHY_WITHIN_S
    while time.monotonic() < deadline and name in _recorded():
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(0.5)
    raise UserError(f"{name} did not become healthy; the end of {FOLDER / f'{name}.log'}:\n{_tail(name)}")


def _tail(name: str) -> str:
    return "\n".join((FOLDER / f"{name}.log").read_text(errors="replace").splitlines()[-15:])


def _call(command: list[str | Path]) -> None:
    done = subprocess.run([str(part) for part in command], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"`{' '.join(map(str, command))}` failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


if __name__ == "__main__":
    main()
