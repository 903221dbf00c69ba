"""The flows, on Prefect's own temporary server: no API URL, no account, nothing set up."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from prefect.exceptions import ParameterTypeError
from prefect.states import Failed
from ruamel.yaml import YAML
from source_files import ROOT

from mdc.config import STAGES, Params, load_params
from mdc.errors import UserError
from pipelines._dvc import StageFailed
from pipelines._run import may_help
from pipelines.full import full

# Several runs on one temporary server. What each came to goes into a file.
RUNS = """
import json
import pipelines._run
from pathlib import Path
from prefect import get_client
from prefect.states import Running
from pipelines._run import project
from pipelines.download import download
from pipelines.full import full
from pipelines.shard import shard
from mdc.processes import only_writer

answers = {}
pipelines._run.ARTIFACT_EVERY_S = 0.0

def attempt(name, flow, **changes):
    try:
        state = flow(return_state=True, **changes)
        answers[name] = [state.name, state.message or ""]
    except BaseException as error:
        answers[name] = [type(error).__name__, str(error)]

attempt("whole", full, shard={"seed": 5})
attempt("rule", full, pretrain={"lr": 1e-4, "t_min": 1.0})
attempt("unknown", full, pretrain={"lrr": 1e-4})

with only_writer(Path("runs/flow.lock"), f"the pipeline in {Path.cwd()}", 0):
    attempt("second", shard)

Path("shard.fail").write_text("2")
attempt("failed", shard, shard={"seed": 6})
Path("shard.fail").unlink()

with get_client(sync_client=True) as client:
    killed = client.create_flow_run(download, state=Running())
    Path("runs/flow.id").write_text(json.dumps({"flow_run": str(killed.id), "servers": []}))
    attempt("after a kill", download)
    answers["killed"] = [client.read_flow_run(killed.id).state.name, ""]
    artifacts = client.read_artifacts()
    answers["artifacts"] = {artifact.key: artifact.data for artifact in artifacts}

Path("answers.json").write_text(json.dumps(answers))
"""


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}


@pytest.fixture
def answers(project: Path) -> tuple[dict[str, Any], str]:
    """What the runs came to, and the log."""
    done = subprocess.run(
        [sys.executable, "-c", RUNS], capture_output=True, text=True, env=environment(), timeout=280, cwd=project
    )
    assert (project / "answers.json").is_file(), done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads((project / "answers.json").read_text()), done.stdout + done.stderr


def test_runs_on_a_temporary_server(project: Path, answers: tuple[dict[str, Any], str]) -> None:
    outcome, log = answers
    # every stage in order, by DVC, with the change written first
    assert outcome["whole"][0] == "Completed"
    assert [line for line in STAGES if f"{line} began at step 0" in log] == list(STAGES)
    assert "params.yaml: shard.seed: 0 -> 5" in log
    # values are refused before anything starts, and nothing is written
    assert outcome["rule"][0] == "Failed"
    assert "t_min 1.0 must be below t_max 1.0" in outcome["rule"][1]
    assert "error: params.yaml: pretrain: t_min 1.0 must be below t_max 1.0" in log, "which `--watch` shows"
    assert "lrr" in outcome["unknown"][1]
    assert load_params("params.yaml").pretrain == load_params(ROOT / "params.yaml").pretrain
    # one run at a time, told by process
    assert outcome["second"][0] == "Failed"
    assert f"the pipeline in {project} is being written by process" in outcome["second"][1]
    # the state's message names the stage's own error, and a user's mistake is not tried again
    assert outcome["failed"][0] == "Failed"
    assert "error: shard.lr = 'x': input should be a number" in outcome["failed"][1]
    assert log.count("shard began at step") == 2
    assert "Traceback" not in log
    # a run whose process was killed is marked, and does not block
    assert outcome["after a kill"][0] == "Completed"
    assert "download began at step 1" not in log
    assert outcome["killed"][0] == "Crashed"
    assert not (project / "runs" / "flow.id").exists()
    # progress is seen in the UI, and ends at the end
    assert outcome["artifacts"]["download-progress"] == 100
    # everything Prefect keeps lies in the project
    assert (project / ".prefect" / "prefect.db").is_file()


def test_ctrl_c_ends_a_flow_and_its_stage(project: Path) -> None:
    """A terminal sends it to every process; one that has lost its server would wait for minutes."""
    pid, log = project / "download.pid", project / "flow.log"
    (project / "download.hang").touch()
    command = [sys.executable, "-m", "pipelines.download"]
    with log.open("w") as file:
        flow = subprocess.Popen(command, stdout=file, stderr=file, env=environment(), start_new_session=True)
    deadline = time.monotonic() + 200
    while not (pid.is_file() and pid.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(flow.pid, signal.SIGINT)
    try:
        assert flow.wait(60) == 130, log.read_text()
    finally:
        flow.kill()
    assert log.read_text().count("stopped; the same command goes on from here") == 1
    assert "Traceback" not in log.read_text()
    assert not psutil.pid_exists(int(pid.read_text()))


def test_parameters_are_the_sections_of_the_file() -> None:
    schema = full.parameters
    assert list(schema.properties) == list(Params.model_fields)
    assert schema.required == []
    form = schema.definitions["PretrainParamsChanges"]
    assert form["additionalProperties"] is False
    assert "objective" in form["properties"]


@pytest.mark.parametrize(
    "bad", [{"pretrain": {"lrr": 1}}, {"pretrain": {"lr": "1e-4"}}, {"shard": {"seed": -1}}, {"pretain": {"lr": 1}}]
)
def test_bad_parameters_are_refused_by_the_form(bad: dict[str, Any]) -> None:
    with pytest.raises((ParameterTypeError, TypeError)):
        full.validate_parameters(bad)


@pytest.mark.parametrize(
    ("error", "helps"),
    [
        (StageFailed("pretrain", 2, ["error: x"]), False),
        (StageFailed("pretrain", 1, ["error: x"]), True),
        (StageFailed("pretrain", -9, ["error: x"]), True),
        (StageFailed("pretrain", 255, ["ERROR: failed to reproduce 'pretrain': missing data 'source': x"]), False),
        (StageFailed("pretrain", 255, ["ERROR: failed to run: exec mdc stage pretrain, exited with 1"]), True),
        (UserError("x"), False),
    ],
)
def test_a_retry_is_for_accidents_not_for_mistakes(error: Exception, helps: bool) -> None:
    assert may_help(None, None, Failed(data=error)) is helps


def test_every_flow_is_deployed() -> None:
    deployments = YAML(typ="safe").load((ROOT / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]
    assert {d["name"]: d["entrypoint"] for d in deployments} == {
        "full-pipeline": "pipelines/full.py:full",
        **{stage: f"pipelines/{stage}.py:{stage}" for stage in STAGES},
    }
    assert all(d["work_pool"]["name"] == "mdc" and d["concurrency_limit"] == 1 for d in deployments)
    assert full.name == "mdc"


@pytest.mark.parametrize("stage", STAGES)
def test_flow_files_are_short(stage: str) -> None:
    assert len((ROOT / "pipelines" / f"{stage}.py").read_text(encoding="utf-8").splitlines()) <= 40


def test_the_backport_is_found_before_prefect_is_imported(tmp_path: Path) -> None:
    (tmp_path / "dataclasses.py").touch()
    script = (
        "import sys; from pathlib import Path; import mdc.doctor\n"
        f"mdc.doctor.backport = lambda: Path({str(tmp_path)!r}, 'dataclasses.py')\n"
        "try:\n    import pipelines.full\nfinally:\n    print('prefect' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip uninstall -y dataclasses" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.strip() == "False"
