"""Tracking with MLflow; no other module imports it.

A tracking server that is slow or down costs telemetry, never training: everything is sent from one background thread,
in order, and tried again until the server is back. What is still unsent at the end is left in a file.
"""

import json
import logging
import os
import socket
import subprocess
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from mdc import files
from mdc.config import Params, TrackingParams
from mdc.errors import UserError

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

log = logging.getLogger(__name__)

PATIENCE_S = 300.0  # for everything still unsent when a run ends; a call that fails ends the wait at once
START_PATIENCE_S = 30.0  # for the first answer where tracking is required
LONGEST_PAUSE_S = 30.0  # between attempts while the server is down
LONGEST_VALUE = 500  # characters of a parameter; MLflow itself cuts longer ones without a word
GOING_ON, NEEDED = "the work goes on", "tracking.required is true, so it is needed"
BATCH = 100  # parameters or tags in one request, MLflow's limit
HTTP_TIMEOUT = "MLFLOW_HTTP_REQUEST_TIMEOUT"
HTTP_LIMITS = {HTTP_TIMEOUT: "5", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}  # MLflow's own hold a call for minutes
UPLOAD_TIMEOUT_S = "120"
TOKEN = "mdc.token"
PARENT = "mlflow.parentRunId"  # the tag by which MLflow shows one run under another

Json = Mapping[str, Any]


def flatten(tree: Json, prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def shorten(value: Any) -> str:
    """The text of a parameter; a long one keeps its beginning and says its length and hash."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)
    if len(text) <= LONGEST_VALUE:
        return text
    return f"{text[: LONGEST_VALUE - 60]}… ({len(text)} characters, hash {files.fingerprint(text)})"


def metric_name(name: str) -> str:
    """A name that MLflow takes: letters, digits and `_ - . / :` and spaces."""
    return "".join(letter if letter.isalnum() or letter in "_-./: " else "_" for letter in name)


def git_commit() -> str:
    """The commit of the working folder, with `+dirty` where tracked files differ from it; "" outside a repository."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()

    try:
        dirty = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+dirty" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


@dataclass
class _Call:
    send: Callable[[], None]
    record: Json  # what is lost, readable, if it is never sent
    essential: bool = False  # whether no later call makes sense without it


class Sender(threading.Thread):
    """Makes calls one after the other on a thread of its own, and again while the server does not answer."""

    def __init__(self, place: str, meanwhile: str = GOING_ON) -> None:
        """place: the server, for messages. meanwhile: what is told to happen while it does not answer."""
        super().__init__(name="tracking", daemon=True)
        self.place, self.meanwhile = place, meanwhile
        self.calls: deque[_Call] = deque()
        self.changed = threading.Condition()
        self.closing = False
        self.down = False
        self.refusal = ""  # why the server has not taken an essential call, on which the thread ends

    def put(self, send: Callable[[], None], essential: bool = False, **record: Any) -> None:
        with self.changed:
            self.calls.append(_Call(send, record, essential))
            self.changed.notify()

    def run(self) -> None:
        pause_s = 1.0
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.calls or self.closing)
                if not self.calls:
                    return
                call = self.calls[0]
            problem = self._attempt(call)
            if self.refusal:
                return
            with self.changed:
                if not problem:
                    self.calls.popleft()
                    if self.down:
                        log.warning("tracking server %s is back; sending what was kept", self.place)
                    self.down, pause_s = False, 1.0
                    continue
                if not self.down:
                    log.warning("no answer from tracking server %s (%s); %s", self.place, problem, self.meanwhile)
                self.down = True
                if self.closing:
                    return
                self.changed.wait_for(lambda: self.closing, timeout=pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _attempt(self, call: _Call) -> str:
        """Make the call: "" if it is done with, else why the server did not answer. A refusal is final."""
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        try:
            call.send()
        except MlflowException as error:
            if error.get_http_status_code() >= 500:
                return _first_line(error)
            if call.essential:
                self.refusal = _first_line(error)
                log.warning("tracking server %s refused this run: %s; %s", self.place, self.refusal, self.meanwhile)
            else:
                log.warning("tracking server %s refused %s: %s", self.place, dict(call.record), _first_line(error))
        except (OSError, SQLAlchemyError) as error:
            return _first_line(error)
        return ""

    def close(self, patience_s: float) -> list[Json]:
        """Wait until all is sent, the server fails to answer, or `patience_s` is over; returns what was not sent."""
        with self.changed:
            self.closing = True
            self.changed.notify()
        self.join(patience_s)
        return [call.record for call in list(self.calls)]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def _client(tracking: TrackingParams) -> "MlflowClient":
    for name, value in HTTP_LIMITS.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic"):  # their reports on creating a database
        logging.getLogger(name).setLevel(logging.WARNING)
    return MlflowClient(tracking.uri)


def _experiment(client: "MlflowClient", tracking: TrackingParams) -> str:
    """The id of the experiment, made if need be: with SQLite its artifacts lie in `mlartifacts` beside the database."""
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(tracking.experiment)
    if experiment is not None:
        return str(experiment.experiment_id)
    place = None
    if tracking.uri.startswith("sqlite:///"):
        database = Path(tracking.uri.removeprefix("sqlite:///").split("?")[0])
        place = (database.absolute().parent / "mlartifacts").as_uri()
    try:
        return str(client.create_experiment(tracking.experiment, artifact_location=place))
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":  # another process was quicker
            raise
        return _experiment(client, tracking)


def _process_tags() -> dict[str, str]:
    """What tells later whether the process that writes a run still lives."""
    process = psutil.Process()
    return {
        "mdc.host": socket.gethostname(),
        "mdc.pid": str(process.pid),
        "mdc.process_start": f"{process.create_time():.2f}",
    }


def _alive(tags: Mapping[str, str]) -> bool:
    try:
        started = psutil.Process(int(tags["mdc.pid"])).create_time()
    except psutil.NoSuchProcess:
        return False
    return abs(started - float(tags["mdc.process_start"])) < 5  # else the number was given to another process


def _close_stale_runs(client: "MlflowClient", experiment_id: str) -> None:
    """End the runs that still say RUNNING although their process on this host is gone."""
    query = f"attributes.status = 'RUNNING' and tags.`mdc.host` = '{socket.gethostname()}'"
    for run in client.search_runs([experiment_id], filter_string=query):
        if not _alive(run.data.tags):
            log.warning("run %s was left running by a process that is gone; it is marked as killed", run.info.run_id)
            client.set_terminated(run.info.run_id, "KILLED")


@dataclass(frozen=True)
class TrackedData:
    """The shards, the hash of their index, and the number of pairs to train on."""

    shards: Path
    version: str
    samples: int


class Tracker:
    """The MLflow run of one training, across restarts. Used by one rank.

    Methods return at once; the work is done in the background.
    """

    def __init__(
        self,
        params: Params,
        tags: Mapping[str, str],
        data: TrackedData,
        run_id: str | None,
        record: Path,
        unsent: Path,
    ) -> None:
        """
        run_id: of the training that is taken up again. record: a file that tells others the run's id and status.
        unsent: the file for what could not be sent.
        Raises UserError where tracking is required and there is no answer.
        """
        self.params, self.tags, self.data = params, dict(tags), data
        self.run_id = run_id
        self.record, self.unsent = record, unsent
        self.sent_until = -1  # images seen at the newest metrics that the run already holds
        self.token = uuid.uuid4().hex  # by which a run is found again whose making was not answered
        self.delivered: tuple[Path, str] | None = None
        self.sender = Sender(params.tracking.uri, NEEDED if params.tracking.required else GOING_ON)
        self.ready = threading.Event()
        self.sender.put(self._open, essential=True, what="start")
        self.sender.start()
        if params.tracking.required:
            self._await()
            self.sender.meanwhile = GOING_ON

    def _await(self) -> None:
        """Wait for the first answer."""
        deadline = time.monotonic() + START_PATIENCE_S
        while not self.ready.wait(0.1):
            if self.sender.refusal or time.monotonic() > deadline:
                what = f"refuses this run ({self.sender.refusal})" if self.sender.refusal else "gives no answer"
                raise UserError(
                    f"tracking.uri {self.params.tracking.uri!r} {what} and tracking.required is true; start the server "
                    "or mend what it says, or set tracking.required: false"
                )

    def _open(self) -> None:
        """Take up the run, or make one, and describe it. Repeated from its beginning if the server fails half-way."""
        self.client = _client(self.params.tracking)
        experiment_id = _experiment(self.client, self.params.tracking)
        run = self._known_run() or self._unanswered(experiment_id)
        parent = {PARENT: self.params.tracking.parent_run} if self.params.tracking.parent_run else {}
        if run is None:
            pretrain, tracking = self.params.pretrain, self.params.tracking
            name = tracking.run_name or f"{pretrain.objective}-{pretrain.preset}"
            tags = {**_process_tags(), **parent, TOKEN: self.token}
            run = self.client.create_run(experiment_id, run_name=name, tags=tags)
        self.run_id = run.info.run_id
        self.client.update_run(run.info.run_id, status="RUNNING")
        for key, value in {**_process_tags(), **parent, **self.tags}.items():
            self.client.set_tag(run.info.run_id, key, value)
        _close_stale_runs(self.client, experiment_id)
        files.write_json(self.record, {"run_id": self.run_id, "status": "RUNNING"})
        self._describe(run)
        self.ready.set()

    def _id(self) -> str:
        assert self.run_id is not None, "calls are made in order, and the first one opens the run"
        return self.run_id

    def _known_run(self) -> "Run | None":
        from mlflow.exceptions import MlflowException

        if self.run_id is None:
            return None
        try:
            run = self.client.get_run(self.run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            log.warning("run %s is gone from the tracking server; a new one is made", self.run_id)
            self.run_id = None
            return None
        history = self.client.get_metric_history(self.run_id, "train/loss")
        self.sent_until = max((metric.step for metric in history), default=-1)
        return run

    def _unanswered(self, experiment_id: str) -> "Run | None":
        """The run that an earlier attempt has made although no answer came."""
        runs = self.client.search_runs([experiment_id], f"tags.`{TOKEN}` = '{self.token}'", max_results=1)
        return runs[0] if runs else None

    def _describe(self, run: "Run") -> None:
        """Log parameters, the whole configuration as an artifact, and the data set.

        A parameter that changed on resume (such as the number of workers) is kept as a tag: MLflow does not let it
        change.
        """
        from mlflow.entities import Dataset, DatasetInput, InputTag, Param

        run_id, config = run.info.run_id, self.params.model_dump()
        values = {name: shorten(value) for name, value in flatten(config).items()}
        old = run.data.params
        new = [Param(name, value) for name, value in values.items() if name not in old]
        for first in range(0, len(new), BATCH):
            self.client.log_batch(run_id, params=new[first : first + BATCH])
        for name, value in values.items():
            if name in old and old[name] != value:
                self.client.set_tag(run_id, f"changed.{name}", value)
        self.client.set_tag(run_id, "mdc.config_hash", files.fingerprint(config))
        self.client.log_dict(run_id, config, "config.json")
        source = json.dumps({"uri": self.data.shards.absolute().as_uri()})
        profile = json.dumps({"samples": self.data.samples})
        dataset = Dataset("shards", self.data.version[:16], source_type="local", source=source, profile=profile)
        self.client.log_inputs(run_id, [DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])])

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """step: images seen. Steps that the run already holds from before a restart are left out.

        A training that is taken up again gives the same numbers at the same steps, so the run keeps the first ones and
        has one of each step; on another number of ranks they differ by rounding. A point that is sent twice, since an
        answer was lost, is one point: time, step and value are the same, and MLflow keeps no two such.
        """
        when = round(time.time() * 1000)

        def send() -> None:
            from mlflow.entities import Metric

            if step > self.sent_until:
                points = [Metric(metric_name(name), value, when, step) for name, value in metrics.items()]
                self.client.log_batch(self._id(), metrics=points)

        self.sender.put(send, step=step, metrics=dict(metrics))

    def deliver(self, folder: Path, fingerprint: str) -> None:
        """Keep the finished checkpoint, as the run ends, under `model`: `runs:/<run>/model` can then be loaded."""
        self.delivered = (folder, fingerprint)

    def finish(self, status: str, patience_s: float = PATIENCE_S) -> None:
        """End the run. status: FINISHED, FAILED or KILLED. Waits `patience_s` seconds at most.

        The status goes before the checkpoint: it is true already, and the upload may take long.
        """

        def end() -> None:
            if self.delivered is not None:
                self.client.set_tag(self._id(), "mdc.fingerprint", self.delivered[1])
            self.client.set_terminated(self._id(), status)
            files.write_json(self.record, {"run_id": self.run_id, "status": status})

        self.sender.put(end, status=status)
        if self.delivered is not None:
            self.sender.put(self._upload, model=str(self.delivered[0]))
        left = self.sender.close(patience_s)
        if left:
            with files.whole_file(self.unsent) as temporary:
                temporary.write_text("".join(json.dumps(record) + "\n" for record in left), encoding="utf-8")
            log.warning("%d records did not reach the tracking server; they are in %s", len(left), self.unsent)

    def _upload(self) -> None:
        assert self.delivered is not None
        before = os.environ.get(HTTP_TIMEOUT, "")
        os.environ[HTTP_TIMEOUT] = UPLOAD_TIMEOUT_S  # a server may take long to store a large file
        try:
            self.client.log_artifacts(self._id(), str(self.delivered[0]), "model")
        finally:
            os.environ[HTTP_TIMEOUT] = before


# ---------------------------------------------------------------------------------------------------------------------
# What later stages add to the run of the model they worked on.


def _add_to_run(tracking: TrackingParams, fingerprint: str, add: Callable[["MlflowClient", str], None]) -> None:
    """Call `add(client, run_id)` for the newest run that made the model `fingerprint`; a dead server costs seconds."""
    if not tracking.uri:
        return

    def send() -> None:
        client = _client(tracking)
        query = f"tags.`mdc.fingerprint` = '{fingerprint}'"
        newest = client.search_runs(
            [_experiment(client, tracking)], query, max_results=1, order_by=["attributes.start_time DESC"]
        )
        if newest:
            add(client, newest[0].info.run_id)
        else:
            log.warning("no run in %s made the model %s, so nothing is added to it", tracking.uri, fingerprint)

    sender = Sender(tracking.uri)
    sender.put(send, model=fingerprint)
    sender.start()
    sender.close(PATIENCE_S)


def log_evaluation(params: Params, fingerprint: str, metrics: Json, step: int, layer: int | None = None) -> None:
    """Add scores to the run that made a model.

    metrics: numbers, nested by name as in `metrics.json`; they are logged as `probe/model/accuracy`. step: images seen
    by the model. layer: the block of the encoder whose features were read, None for the last.
    """

    def add(client: "MlflowClient", run_id: str) -> None:
        from mlflow.entities import Metric, RunTag

        when = round(time.time() * 1000)
        flat = {name.replace(".", "/"): value for name, value in flatten(metrics).items()}
        points = [
            Metric(metric_name(name), float(value), when, step)
            for name, value in flat.items()
            if not isinstance(value, Mapping)  # an empty part
        ]
        block = RunTag("mdc.layer", "last" if layer is None else str(layer))
        client.log_batch(run_id, metrics=points, tags=[block])

    _add_to_run(params.tracking, fingerprint, add)


def log_report(params: Params, fingerprint: str, html: Path) -> None:
    """Add the report to the run that made a model, as the artifact `report/`."""
    _add_to_run(params.tracking, fingerprint, lambda client, run_id: client.log_artifact(run_id, str(html), "report"))


def close_run(tracking: TrackingParams, run_id: str, status: str) -> None:
    """Set the status of a run whose own process could not: it was killed, or ended before it knew why."""
    if not tracking.uri:
        return
    sender = Sender(tracking.uri)
    sender.put(lambda: _client(tracking).set_terminated(run_id, status), run=run_id, status=status)
    sender.start()
    sender.close(PATIENCE_S)


class Group:
    """The run under which the runs of a sweep are shown. Used by one process; every call waits for the server.

    Without a server there is no such run, `run_id` is "", and the runs of the sweep stand alone.
    """

    def __init__(self, tracking: TrackingParams, name: str, record: Path) -> None:
        """Take up the run that the file `record` names, or make one and name it there.

        Raises UserError where tracking is required and there is no answer.
        """
        self.tracking, self.name, self.record = tracking, name, record
        self.run_id = ""
        if not tracking.uri:
            return
        self._send(self._open, START_PATIENCE_S, NEEDED if tracking.required else GOING_ON, what="start")
        if tracking.required and not self.run_id:
            raise UserError(
                f"tracking.uri {tracking.uri!r} gives no answer and tracking.required is true; start the server, or "
                "set tracking.required: false"
            )

    def _send(self, send: Callable[[], None], patience_s: float, meanwhile: str = GOING_ON, **record: Any) -> None:
        sender = Sender(self.tracking.uri, meanwhile)
        sender.put(send, **record)
        sender.start()
        sender.close(patience_s)

    def _open(self) -> None:
        from mlflow.exceptions import MlflowException

        client = _client(self.tracking)
        experiment_id = _experiment(client, self.tracking)
        known = files.read_json(self.record)["run_id"] if self.record.is_file() else ""
        try:
            run = client.get_run(known) if known else None
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            run = None
        run = run or client.create_run(experiment_id, run_name=self.name, tags=_process_tags())
        run_id = str(run.info.run_id)
        client.update_run(run_id, status="RUNNING")
        for key, value in {**_process_tags(), "mdc.sweep": self.name, "mdc.git_commit": git_commit()}.items():
            client.set_tag(run_id, key, value)
        files.write_json(self.record, {"run_id": run_id})
        self.run_id = run_id

    def finish(self, status: str, artifacts: Sequence[Path] = ()) -> None:
        """Keep files with the run, and end it. status: FINISHED, FAILED or KILLED."""
        if not self.run_id:
            return

        def send() -> None:
            client = _client(self.tracking)
            client.set_terminated(self.run_id, status)
            for path in artifacts:
                client.log_artifact(self.run_id, str(path))

        self._send(send, PATIENCE_S, run=self.run_id, status=status)


def fetch_model(uri: str, tracking_uri: str | None = None) -> Path:
    """The local folder of a model in MLflow, such as `runs:/<run id>/model`.

    tracking_uri: the server; None takes MLflow's own setting (MLFLOW_TRACKING_URI).
    """
    from mlflow.artifacts import download_artifacts
    from mlflow.exceptions import MlflowException

    try:
        return Path(download_artifacts(artifact_uri=uri, tracking_uri=tracking_uri))
    except (MlflowException, OSError) as error:
        raise UserError(f"{uri} could not be fetched from MLflow: {_first_line(error)}") from None
