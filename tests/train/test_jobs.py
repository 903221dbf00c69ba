"""Jobs of a cluster, as far as they can be looked at without one; tests/train/test_slurm.py has a real Slurm."""

import io
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from ruamel.yaml import YAML
from source_files import ROOT

from mdc.config import Params
from mdc.errors import TrainingFailed, UserError
from mdc.train import jobs
from mdc.train.jobs import KubernetesJob, SlurmJob, State, kubernetes_state

MakeParams = Callable[..., Params]
HOSTS = {"launcher": "kubernetes", "hosts": 4, "processes": 2, "device": "auto"}


@pytest.fixture
def manifest(small_params: MakeParams, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """`manifest(**compute)`: the documents of the shipped template, filled in."""
    monkeypatch.chdir(ROOT)

    def fill(**compute: Any) -> list[dict[str, Any]]:
        job = KubernetesJob(small_params(compute={**HOSTS, **compute}), Path("runs/pretrain-0123456789abcdef"))
        return list(YAML(typ="safe").load_all(job.manifest()))

    return fill


@pytest.mark.parametrize("version", ["1.29", "1.37"])
@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_the_manifest_is_what_kubernetes_takes(
    manifest: Callable[..., list[dict[str, Any]]], version: str, device: str
) -> None:
    documents = manifest(device=device)
    assert [document["kind"] for document in documents] == ["Service", "Job"]
    for document in documents:
        kubernetes_validate.validate(document, version, strict=True)


def test_a_misspelt_manifest_would_be_refused(manifest: Callable[..., list[dict[str, Any]]]) -> None:
    job = manifest()[1]
    job["spec"]["complettions"] = 2
    with pytest.raises(kubernetes_validate.ValidationError, match="complettions"):
        kubernetes_validate.validate(job, "1.37", strict=True)


def test_the_manifest_holds_what_was_asked_for(manifest: Callable[..., list[dict[str, Any]]]) -> None:
    service, job = manifest(kubernetes={"image": "registry/mdc:1", "claim": "project", "cpus": 12, "memory": "100Gi"})
    name = service["metadata"]["name"]
    assert re.fullmatch(r"mdc-[0-9a-f]{16}", name), "a label of the name service"
    assert job["metadata"]["name"] == service["spec"]["selector"]["job-name"] == name
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert spec["completions"] == spec["parallelism"] == 4
    (container,) = pod["containers"]
    assert container["image"] == "registry/mdc:1"
    assert container["resources"] == {
        "requests": {"cpu": 12, "memory": "100Gi"},
        "limits": {"memory": "100Gi", "nvidia.com/gpu": 2},
    }
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "project"}
    # the first pod is where the hosts meet, by the name that its index and the service give it
    assert f"--endpoint={name}-0.{pod['subdomain']}:29500" in container["args"]
    # the pods' own commands are commands of this version
    words = container["command"][container["command"].index("mdc") :]
    done = subprocess.run([sys.executable, "-m", "mdc.cli", *words[1:], "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert all(argument.partition("=")[0] in done.stdout for argument in container["args"])


def test_preemption_counts_as_no_failure_and_a_mistake_ends_the_job(
    manifest: Callable[..., list[dict[str, Any]]],
) -> None:
    rules = manifest()[1]["spec"]["podFailurePolicy"]["rules"]
    by_code = {rule["onExitCodes"]["values"][0]: rule["action"] for rule in rules if "onExitCodes" in rule}
    assert by_code == {2: "FailJob", 143: "Ignore"}
    assert manifest()[1]["spec"]["template"]["spec"]["restartPolicy"] == "Never", "which failure policies ask for"


def test_no_gpus_are_asked_for_on_the_cpu(manifest: Callable[..., list[dict[str, Any]]]) -> None:
    (container,) = manifest(device="cpu")[1]["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 0


def test_an_unknown_placeholder_is_named(tmp_path: Path, small_params: MakeParams) -> None:
    (tmp_path / "mine.yaml").write_text("name: $nmae")
    compute = {**HOSTS, "kubernetes": {"manifest": str(tmp_path / "mine.yaml")}}
    with pytest.raises(UserError, match=r"mine.yaml: placeholder 'nmae' is not known; known: name, hosts"):
        KubernetesJob(small_params(compute=compute), tmp_path / "pretrain-0").manifest()


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({"active": 2, "ready": 1}, State("2 pods active, 1 ready")),
        ({}, State("0 pods active, 0 ready")),
        ({"conditions": [{"type": "Suspended", "status": "True"}]}, State("0 pods active, 0 ready")),
        ({"conditions": [{"type": "Complete", "status": "True"}]}, State("Complete", over=True)),
        (
            {"conditions": [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": "m"}]},
            State("Failed: BackoffLimitExceeded: m", over=True, code=1),
        ),
        (
            {"conditions": [{"type": "Failed", "status": "True", "reason": "PodFailurePolicy", "message": "m"}]},
            State("Failed: PodFailurePolicy: m", over=True, code=2),
        ),
    ],
)
def test_states_of_kubernetes(status: dict[str, Any], expected: State) -> None:
    assert kubernetes_state({"status": status}) == expected


@pytest.mark.parametrize(("launcher", "command"), [("slurm", "squeue"), ("kubernetes", "kubectl")])
def test_a_machine_without_the_cluster_is_told(
    tmp_path: Path, small_params: MakeParams, launcher: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    params = small_params(compute={"launcher": launcher})
    with pytest.raises(UserError, match=f"needs the command '{command}', which is not on this machine"):
        jobs.run_as_job(params, tmp_path / "pretrain-0", tmp_path / "model", lambda status: None)


FAILING = {  # what the commands say where they reach no cluster
    "squeue": """squeue: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host
squeue: error: fetch_config: DNS SRV lookup failed
squeue: fatal: Could not establish a configuration source""",
    "kubectl": """E1130 20:19:24.142719   20363 memcache.go:265] "Unhandled Error" err="couldn't get the list"
E1130 20:19:24.144071   20363 memcache.go:265] "Unhandled Error" err="couldn't get the list"
The connection to the server localhost:8080 was refused - did you specify the right host or port?""",
}


@pytest.mark.parametrize(
    ("launcher", "command", "told"),
    [
        (
            "slurm",
            "squeue",
            "`squeue` failed: squeue: fatal: Could not establish a configuration source; run this where `sinfo` "
            "reaches the cluster, or set compute.launcher: local",
        ),
        (
            "kubernetes",
            "kubectl",
            "`kubectl get` failed: The connection to the server localhost:8080 was refused - did you specify the right "
            "host or port?; run this where `kubectl cluster-info` reaches the cluster, or set compute.launcher: local",
        ),
    ],
)
def test_a_cluster_that_does_not_answer_is_told_in_one_line(
    tmp_path: Path, small_params: MakeParams, launcher: str, command: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / command
    script.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{FAILING[command]}\nEND\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    params = small_params(compute={"launcher": launcher})
    with pytest.raises(UserError) as caught:
        jobs.run_as_job(params, tmp_path / "pretrain-0", tmp_path / "model", lambda status: None)
    assert str(caught.value) == told


def test_what_a_cluster_refuses_is_told_whole(tmp_path: Path) -> None:
    script = tmp_path / "sbatch"
    script.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition: x' >&2\necho failed >&2\nexit 1\n")
    script.chmod(0o755)
    with pytest.raises(UserError, match=r"sbatch` failed: sbatch: error: invalid partition: x; failed; mend it"):
        jobs._call([str(script), "--parsable"], "mend it")


def test_other_data_or_another_folder_is_another_job(tmp_path: Path, small_params: MakeParams) -> None:
    params = small_params()
    names = {SlurmJob(params, tmp_path / part).name for part in ("a/pretrain-0", "a/pretrain-1", "b/pretrain-0")}
    assert len(names) == 3
    assert SlurmJob(params, tmp_path / "a" / "pretrain-0").name in names


def test_a_log_is_passed_on_once_with_its_last_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, passed = tmp_path / "log.txt", io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr(sys, "stderr", passed)
    path.write_bytes(b"of an earlier job\nerror: old\n")
    log = jobs._Log(path, path.stat().st_size)
    log.show()
    with path.open("ab") as file:
        for text in (b"pretrain: 1%\rpretrain: 2%\rerr", b"or: rank 1 failed", b": x\nmore\n"):
            file.write(text)
            file.flush()
            log.show()
    assert passed.buffer.getvalue() == b"pretrain: 1%\rpretrain: 2%\rerror: rank 1 failed: x\nmore\n"  # type: ignore[attr-defined]
    assert log.last_error == "rank 1 failed: x"


@pytest.mark.parametrize(
    ("state", "kind", "words"),
    [
        (State("FAILED", over=True, code=2), UserError, "lr is wrong; job 7 ended as FAILED"),
        (State("FAILED", over=True, code=1), TrainingFailed, "lr is wrong; job 7 ended as FAILED"),
        (State("CANCELLED", over=True, cancelled=True), UserError, "it was cancelled; run the same command"),
    ],
)
def test_what_ended_a_job_says_whether_to_try_again(state: State, kind: type[Exception], words: str) -> None:
    failure = jobs._failure("7", state, "lr is wrong", Path("log.txt"))
    assert type(failure) is kind
    assert words in str(failure)
