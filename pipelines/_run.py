"""What the flows share: their parameters, one run at a time, and the output of a stage in Prefect's log."""

import inspect
import logging
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import psutil
from prefect import Flow, get_client, get_run_logger
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.exceptions import PrefectException
from prefect.runtime import flow_run
from prefect.states import Crashed
from pydantic import BaseModel

from mdc.config import Params, change_params, load_params, partial
from mdc.errors import Terminated, UserError
from mdc.files import read_json, write_json
from mdc.processes import deaf_children, on_ctrl_c, only_writer, raise_on_sigterm
from pipelines._dvc import USER_ERROR, StageFailed, reproduce

ARTIFACT_EVERY_S = 3.0
LOG_EVERY_S = 30.0
_PERCENT = re.compile(r"(\d+)%\|")


def changes_to(*sections: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a flow one optional parameter per section of params.yaml, typed, so that Prefect shows and checks a form."""

    def with_signature(function: Callable[..., None]) -> Callable[..., None]:
        parameters = []
        for name in sections or Params.model_fields:
            section: Any = Params.model_fields[name].annotation
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(name, kind, default=None, annotation=partial(section) | None))
        function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return function

    return with_signature


@contextmanager
def project(changes: Mapping[str, BaseModel | None]) -> Iterator[None]:
    """Hold this folder for one flow run, and write the changed values into params.yaml as the run's first act.

    Raises UserError for a value that breaks a rule, and while another flow runs here.
    """
    log = get_run_logger()
    runs, here = Path(load_params().paths.runs), f"the pipeline in {Path.cwd()}"
    try:
        with only_writer(runs / "flow.lock", here, patience_s=0), _recorded(runs / "flow.id", log):
            values = {name: section.model_dump(exclude_unset=True) for name, section in changes.items() if section}
            for line in change_params("params.yaml", values):
                log.info("params.yaml: %s", line)
            yield
    except UserError as error:  # `--watch` shows the log, not the message of the final state
        log.error("error: %s", error)
        raise


@contextmanager
def _recorded(record: Path, log: logging.Logger | logging.LoggerAdapter[Any]) -> Iterator[None]:
    """Keep this run's id in a file while it runs. One that is still there is of a run that was killed: clear up."""
    if record.is_file():
        killed = read_json(record)
        _end_servers(killed["servers"])
        with get_client(sync_client=True) as client:
            try:
                run = client.read_flow_run(UUID(killed["flow_run"]))
                if run.state is None or not run.state.is_final():
                    state: Any = Crashed(message="Its process was killed; found by the next run.")
                    client.set_flow_run_state(run.id, state, force=True)
                    log.warning("Marked flow run %r as crashed: its process was killed", run.name)
            except PrefectException:
                log.info("The server does not know the killed flow run before this one")
    write_json(record, {"flow_run": str(flow_run.id), "servers": _temporary_servers()})
    try:
        yield
    finally:
        record.unlink(missing_ok=True)


def _temporary_servers() -> list[list[float]]:
    """Process id and start time of the temporary servers that Prefect started for this process."""
    children = psutil.Process().children()
    return [[child.pid, child.create_time()] for child in children if "uvicorn" in " ".join(child.cmdline())]


def _end_servers(servers: list[list[float]]) -> None:
    for pid, started in servers:
        with suppress(psutil.NoSuchProcess):
            server = psutil.Process(int(pid))
            if server.create_time() == started:
                server.terminate()


def may_help(_task: Any, _run: Any, state: Any) -> bool:
    """Whether to run a failed stage again: not after a user's mistake."""
    error = state.result(raise_on_failure=False)
    return not (isinstance(error, UserError) or (isinstance(error, StageFailed) and error.code == USER_ERROR))


def run_stage(stage: str) -> None:
    """Bring one stage up to date through DVC, inside a Prefect task."""
    log = get_run_logger()
    with _Bar(stage) as bar:

        def line(text: str) -> None:
            bar.clear()
            log.log(logging.ERROR if text.startswith(("error: ", "ERROR: ")) else logging.INFO, text)

        reproduce(stage, line, bar.show)


class _Bar:
    """A stage's progress bar: as it is on a terminal, now and then in a log, and as an artifact in Prefect."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._terminal = sys.stderr.isatty()
        self._log = get_run_logger()
        self._logged = self._sent = time.monotonic()
        self._artifact: Any = None  # its UUID
        self._sending: Future[None] | None = None
        # updates wait for the server, and the stage would wait for them if they were made where its output is read
        self._thread = ThreadPoolExecutor(max_workers=1)

    def __enter__(self) -> "_Bar":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.clear()
        if kind is None and self._sending is not None:
            self._thread.submit(copy_context().run, self._send, 100.0, f"{self._stage}: done")
        self._thread.shutdown(wait=kind is None)

    def clear(self) -> None:
        if self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def show(self, text: str) -> None:
        now = time.monotonic()
        if self._terminal:
            print(f"\r{text}", end="", file=sys.stderr, flush=True)
        elif now - self._logged > LOG_EVERY_S:
            self._logged = now
            self._log.info(text)
        done = _PERCENT.search(text)
        if done and now - self._sent > ARTIFACT_EVERY_S and (self._sending is None or self._sending.done()):
            self._sent = now
            self._sending = self._thread.submit(copy_context().run, self._send, float(done[1]), text)

    def _send(self, percent: float, text: str) -> None:
        try:
            if self._artifact is None:
                self._artifact = create_progress_artifact(percent, key=f"{self._stage}-progress", description=text)
            else:
                update_progress_artifact(self._artifact, percent, description=text)
        except (httpx.HTTPError, PrefectException) as error:
            self._log.warning("Progress was not sent to Prefect: %s", error)


def _is_news(record: logging.LogRecord) -> bool:
    """False for the traceback of a failure whose message says all, and which the final state repeats."""
    return not (record.exc_info and isinstance(record.exc_info[1], (StageFailed, UserError)))


for _name in ("prefect.flow_runs", "prefect.task_runs"):
    logging.getLogger(_name).addFilter(_is_news)


def main(flow: Flow[..., None]) -> None:
    """Run a flow from the command line. The log tells what went wrong; the last line says it again, short."""
    try:
        on_ctrl_c(signal.default_int_handler)  # everything is loaded
        load_params()  # bad parameters need no server to be told
        with deaf_children():  # a flow that is being stopped still needs its server, and would wait for it for minutes
            get_client(sync_client=True)  # starts Prefect's temporary server, where there is no other
        with raise_on_sigterm():
            flow()
    except (UserError, StageFailed) as error:
        sys.exit(f"error: {error}")
    except Terminated:  # an orderly exit, on which Prefect ends its temporary server
        sys.exit(128 + signal.SIGTERM)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
