"""A training as a job of a cluster: started once, followed for as long as this process lives, found again by the next.

A job is known by its name, a hash of the folder of its training. So there is no moment at which a job exists and
nothing says so, and a process that died leaves nothing to clear up. The job writes its result under runs/, where DVC
does not look: a training that ends while nobody follows it is delivered by the next run.
"""

import getpass
import json
import os
import re
import shutil
import string
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from mdc import files
from mdc.config import Params
from mdc.errors import Terminated, TrainingFailed, UserError
from mdc.processes import tied

POLL_S = 5.0  # between two questions to the cluster
LOG_S = 0.5  # between two looks into the log
CANCEL_S = 20.0  # for a cancelled job to save a checkpoint and end; a Prefect worker uses force after 30
PARENT_ENDS_S = 1.0  # for all of its threads
SLURM_OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}
SLURM_OVER |= {"PREEMPTED", "REVOKED"}
USER_ERROR = 2  # exit code of a command for bad input
ELSEWHERE = "run this where `{}` reaches the cluster, or set compute.launcher: local"
_KUBECTL_LOG = re.compile(r"[EWI]\d{4} \d\d:\d\d")


@dataclass(frozen=True)
class State:
    """How a job stands. code: the exit code of its command, once it is over."""

    words: str  # the cluster's own
    queued: bool = False
    over: bool = False
    cancelled: bool = False
    code: int = 0


class Job(ABC):
    """A cluster's job for one training. folder: for its parameters, log and result, which its hosts must see."""

    def __init__(self, params: Params, work: Path) -> None:
        self.params = params
        self.folder = work.with_name(f"job-{work.name}")
        self.name = f"mdc-{files.fingerprint(str(work.absolute()))}"
        self.parameters, self.log, self.result = (self.folder / name for name in ("params.json", "log.txt", "model"))

    @abstractmethod
    def find(self) -> str:
        """The id of the job, if there is one that is not over, else ""."""

    @abstractmethod
    def submit(self) -> str:
        """Start the job and return its id."""

    @abstractmethod
    def state(self, job: str) -> State: ...

    @abstractmethod
    def cancel(self, job: str) -> None: ...

    def keep_log(self, job: str) -> None:  # noqa: B027 -- most clusters write the file themselves
        """Have the job's output written to `log`."""

    def end_log(self) -> None:  # noqa: B027
        """Give up what `keep_log` started."""


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _call(command: list[str], fix: str = "", stdin: str = "") -> str:
    """The output of a cluster's command.

    fix: what helps where it fails. Raises UserError with its own words where it fails or is not there.
    """
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, errors="replace")
    except FileNotFoundError:
        raise UserError(
            f"compute.launcher needs the command {command[0]!r}, which is not on this machine; run this where jobs are "
            "submitted, or set compute.launcher: local"
        ) from None
    if done.returncode:
        name = " ".join(word for word in command[:2] if not word.startswith("-"))
        raise UserError(f"`{name}` failed: {_reason(done.stderr or done.stdout)}" + (f"; {fix}" if fix else ""))
    return done.stdout


def _reason(output: str) -> str:
    """In one line, without kubectl's log of each attempt and what leads up to a fatal error of Slurm's."""
    lines = list(dict.fromkeys(line.strip() for line in output.splitlines() if line.strip()))
    told = [line for line in lines if not _KUBECTL_LOG.match(line)] or lines
    fatal = [line for line in told if ": fatal: " in line]
    return "; ".join(fatal or told)[-2000:]


class SlurmJob(Job):
    """sbatch of `compute.slurm.script`."""

    def find(self) -> str:
        query = ["squeue", "--noheader", "--user", getpass.getuser(), "--name", self.name, "--format", "%i %T"]
        while jobs := [line.split() for line in _call(query, ELSEWHERE.format("sinfo")).splitlines()]:
            number, state = jobs[0]
            if state != "COMPLETING":
                return number
            _say(f"waiting for the end of job {number}")  # it may still save a checkpoint
            time.sleep(POLL_S)
        return ""

    def submit(self) -> str:
        compute, asked = self.params.compute, self.params.compute.slurm
        options = {
            "job-name": self.name,
            "chdir": os.getcwd(),
            "output": str(self.log),
            "nodes": compute.hosts,
            "partition": asked.partition,
            "account": asked.account,
            "time": asked.time,
            "cpus-per-task": asked.cpus_per_node,
            "gpus-per-node": 0 if compute.device == "cpu" else compute.processes,
        }
        given = [f"--{name}={value}" for name, value in options.items() if value]
        script = [asked.script, str(self.parameters), str(self.result)]
        fix = f"mend compute.slurm, or {asked.script}"
        return _call(["sbatch", "--parsable", *given, *asked.options, *script], fix).strip().partition(";")[0]

    def state(self, job: str) -> State:
        try:
            shown = _call(["scontrol", "show", "job", "--oneliner", job])
        except UserError as error:
            if "Invalid job id" not in str(error):  # the controller does not answer, which passes
                return State(str(error))
            return State("forgotten by Slurm", over=True, code=1)
        fields = dict(part.partition("=")[::2] for part in shown.split())
        words, code = fields["JobState"], int(fields.get("ExitCode", "0:0").partition(":")[0])
        reason = fields.get("Reason", "None")
        return State(
            words if reason == "None" else f"{words} ({reason})",
            queued=words == "PENDING",
            over=words in SLURM_OVER,
            cancelled=words == "CANCELLED",
            code=code,
        )

    def cancel(self, job: str) -> None:
        _call(["scancel", job])


class KubernetesJob(Job):
    """kubectl apply of `compute.kubernetes.manifest`, an indexed Job and its headless service."""

    logs: subprocess.Popen[bytes] | None = None

    def _kubectl(self, *arguments: str, fix: str = "", stdin: str = "") -> str:
        return _call(["kubectl", *arguments, "--namespace", self.params.compute.kubernetes.namespace], fix, stdin)

    def manifest(self) -> str:
        """The filled-in template."""
        compute, asked = self.params.compute, self.params.compute.kubernetes
        path = Path(asked.manifest)
        values = {
            "name": self.name,
            "hosts": compute.hosts,
            "gpus": 0 if compute.device == "cpu" else compute.processes,
            "params": self.parameters,
            "result": self.result,
            **asked.model_dump(),
        }
        try:
            return string.Template(path.read_text(encoding="utf-8")).substitute(values)
        except (KeyError, ValueError) as error:
            raise UserError(f"{path}: placeholder {error} is not known; known: {', '.join(values)}") from None
        except FileNotFoundError:
            raise UserError(f"compute.kubernetes.manifest {path} does not exist") from None

    def find(self) -> str:
        query = ["get", "job", self.name, "--ignore-not-found", "--output", "json"]
        while known := self._kubectl(*query, fix=ELSEWHERE.format("kubectl cluster-info")).strip():
            job = json.loads(known)
            if "deletionTimestamp" in job["metadata"]:
                _say(f"waiting for the end of job {self.name}")  # its pods may still save a checkpoint
                time.sleep(POLL_S)
            elif kubernetes_state(job).over:
                self.cancel(self.name)
            else:
                return self.name
        return ""

    def submit(self) -> str:
        fix = f"mend compute.kubernetes, or {self.params.compute.kubernetes.manifest}"
        self._kubectl("apply", "--filename", "-", fix=fix, stdin=self.manifest())
        return self.name

    def state(self, job: str) -> State:
        try:
            shown = self._kubectl("get", "job", job, "--ignore-not-found", "--output", "json")
        except UserError as error:  # the server does not answer, which passes
            return State(str(error))
        return kubernetes_state(json.loads(shown)) if shown.strip() else State("deleted", over=True, cancelled=True)

    def cancel(self, job: str) -> None:
        """The job is there until its pods have ended."""
        self._kubectl("delete", "job,service", job, "--ignore-not-found", "--cascade=foreground", "--wait=false")

    def keep_log(self, job: str) -> None:
        """Follow the first pod. The command ends with its pod, and fails while there is none."""
        if self.logs is None or self.logs.poll() is not None:
            selector = f"job-name={job},batch.kubernetes.io/job-completion-index=0"
            command = ["kubectl", "--namespace", self.params.compute.kubernetes.namespace, "logs", "--follow"]
            with self.log.open("ab") as file:
                self.logs = subprocess.Popen(
                    tied([*command, "--selector", selector, "--tail=-1", f"--since={2 * POLL_S:.0f}s"]),
                    stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.DEVNULL,
                )  # fmt: skip

    def end_log(self) -> None:
        if self.logs is not None:
            self.logs.terminate()
            self.logs.wait()


def kubernetes_state(job: dict[str, Any]) -> State:
    """From what `kubectl get job --output json` says."""
    status = job.get("status", {})
    for condition in status.get("conditions", []):
        if condition["status"] == "True" and condition["type"] in ("Complete", "Failed"):
            words = ": ".join(condition[part] for part in ("type", "reason", "message") if condition.get(part))
            mistake = condition.get("reason") == "PodFailurePolicy"  # the template's rule for exit code 2
            failed = condition["type"] == "Failed"
            return State(words, over=True, code=USER_ERROR if mistake else int(failed))
    return State(f"{status.get('active', 0)} pods active, {status.get('ready', 0)} ready")


JOBS: dict[str, type[Job]] = {"slurm": SlurmJob, "kubernetes": KubernetesJob}


def run_as_job(params: Params, work: Path, output: Path, close_tracking: Callable[[str], None]) -> None:
    """Start the training as a job, or find it under way, follow it to its end and bring its result to `output`.

    close_tracking: called with FAILED or KILLED where the job ends so, since it may not have been able to tell.
    Raises UserError for bad input and where someone else cancelled the job, TrainingFailed when it fails, Terminated
    or KeyboardInterrupt when told to end, which cancels the job. But if this process is ended because its parent is
    gone, the job goes on, and the next run follows it.
    """
    job, parent, number = JOBS[params.compute.launcher](params, work), os.getppid(), ""
    if not (job.result / files.MANIFEST).is_file():
        start = _size(job.log)
        try:
            number = job.find()
            if number:
                _say(f"job {number} is under way; following it (log: {job.log})")
            else:
                shutil.rmtree(job.result, ignore_errors=True)
                files.write_json(job.parameters, params.model_dump())
                number = job.submit()
                _say(f"job {number} started (log: {job.log})")
            state, last_error = _follow(job, number, start)
        except (KeyboardInterrupt, Terminated):
            if _is_gone(parent):
                _say("what started this is gone; a job that is under way goes on, and the same command follows it")
            elif number := number or job.find():
                _cancel(job, number)
                close_tracking("KILLED")
            raise
        finally:
            job.end_log()
        if not (job.result / files.MANIFEST).is_file():
            close_tracking("KILLED" if state.cancelled else "FAILED")
            raise _failure(number, state, last_error, job.log)
    with files.whole_folder(output) as temporary:
        shutil.copytree(job.result, temporary, dirs_exist_ok=True)
    shutil.rmtree(job.result)


def _is_gone(parent: int) -> bool:
    """Whether this process was ended because its parent is gone. Threads of the parent end one after the other, and
    the kernel's signal comes with the one that started this process, while the parent still seems to be there."""
    deadline = time.monotonic() + PARENT_ENDS_S
    while os.getppid() == parent and time.monotonic() < deadline:
        time.sleep(0.02)
    return os.getppid() != parent


def _failure(number: str, state: State, last_error: str, log_file: Path) -> Exception:
    where = f"job {number} ended as {state.words} (log: {log_file})"
    if state.cancelled:
        return UserError(f"{where}: it was cancelled; run the same command to go on from its newest checkpoint")
    message = f"{last_error}; {where}" if last_error else where
    return UserError(message) if state.code == USER_ERROR else TrainingFailed(message)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


class _Log:
    """What a job has written since the last look, passed on to stderr."""

    def __init__(self, path: Path, start: int) -> None:
        self.path, self.at = path, start
        self.line, self.last_error = b"", ""

    def show(self) -> None:
        if _size(self.path) <= self.at:
            return
        with self.path.open("rb") as file:
            file.seek(self.at)
            text = file.read()
        self.at += len(text)
        stderr: IO[bytes] = sys.stderr.buffer
        stderr.write(text)
        stderr.flush()
        *lines, self.line = (self.line + text).replace(b"\r", b"\n").split(b"\n")
        errors = [line for line in lines if line.startswith(b"error: ")]
        if errors:
            self.last_error = errors[-1].decode(errors="replace").removeprefix("error: ")


def _follow(job: Job, number: str, start: int, until: float = float("inf")) -> tuple[State, str]:
    """Pass on the job's log until it is over, or until this time; returns its state and its last error."""
    shown, words = _Log(job.log, start), ""
    while True:
        state = job.state(number)
        if state.words != words:
            words = state.words
            _say(f"job {number}: {words}")
        if state.queued:
            shown.last_error = ""  # of the run before the job went back into the queue
        if not state.over:
            job.keep_log(number)
        next_poll = time.monotonic() + POLL_S
        shown.show()
        if state.over or time.monotonic() > until:
            return state, shown.last_error
        while time.monotonic() < next_poll:
            time.sleep(LOG_S)
            shown.show()


def _cancel(job: Job, number: str) -> None:
    _say(f"cancelling job {number}")
    start = _size(job.log)
    job.cancel(number)
    _follow(job, number, start, until=time.monotonic() + CANCEL_S)
