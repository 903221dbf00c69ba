"""`dvc repro` of one stage as a child process: its output line by line, and its end with ours. No Prefect here."""

import os
import re
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from mdc.processes import end_below, tied

GRACE_S = 25.0  # seconds; a Prefect worker uses force after 30
USER_ERROR = 2  # exit code of `mdc stage` for bad input
DVC_ERROR = 255  # exit code of DVC, which names in its last lines that of a command that it ran
_SEPARATOR = re.compile(rb"[\r\n]")
_ANNOUNCED = ("Running stage", "> exec ", "ERROR: failed to reproduce")  # what DVC says around a stage's own words
_HINTS = (  # what DVC says after each stage
    "Generating lock file",
    "Updating lock file",
    "To track the changes with git",
    "git add",
    "To enable auto staging",
    "dvc config core.autostage",
    "Use `dvc push`",
)
_EXIT_CODE = re.compile(r"exited with (\d+)")
_MISSING = re.compile(r"No such file or directory: '(.*)'|missing data 'source': (\S+)")  # what the stage reads


class StageFailed(RuntimeError):
    """A stage did not finish. The message holds its last words; `code` is the exit code of its command.

    Where DVC did not run the command, or not record what it made, it would not do so the next time: a user's mistake.
    """

    def __init__(self, stage: str, code: int, last_lines: list[str]) -> None:
        exits = [int(match[1]) for match in map(_EXIT_CODE.search, last_lines) if match]
        self.code = exits[-1] if exits else USER_ERROR if code == DVC_ERROR else code
        words = [line for line in last_lines if not line.startswith(_ANNOUNCED)] or last_lines
        errors = [number for number, line in enumerate(words) if line.startswith("error: ")]
        message = f"stage {stage!r}: " + "\n".join(words[errors[-1] :] if errors else words[-4:])
        if not exits and (missing := _MISSING.search(message)):
            makes = "run `mdc sample`, or set download.input" if stage == "download" else "run the stages before it"
            message = f"stage {stage!r} reads {missing[1] or missing[2]}, which is not there; {makes}"
        super().__init__(message)


def split_output(stream: IO[bytes]) -> Iterator[tuple[str, bool]]:
    """The text between line ends, as soon as it is there. True: a carriage return ends it, so it is a progress bar."""
    rest = b""
    while chunk := os.read(stream.fileno(), 65536):
        rest += chunk
        while match := _SEPARATOR.search(rest):
            text, rest = rest[: match.start()], rest[match.end() :]
            if text.strip():
                yield text.decode(errors="replace"), match[0] == b"\r"
    if rest.strip():
        yield rest.decode(errors="replace"), False


def reproduce(stage: str, on_line: Callable[[str], None], on_progress: Callable[[str], None]) -> None:
    """Run `dvc repro --single-item STAGE` in the current folder and pass on what it prints.

    Whatever ends this call (an error, Ctrl-C, SIGTERM, a time limit) ends the stage and all its processes; if this
    process is killed, the kernel ends them. Raises StageFailed.
    """
    command = tied([sys.executable, "-m", "dvc", "repro", "--single-item", stage])
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=_environment(),
    ) as process:
        assert process.stdout is not None
        last: deque[str] = deque(maxlen=8)
        try:
            for text, is_progress in split_output(process.stdout):
                if is_progress:
                    on_progress(text)
                elif not text.strip().startswith(_HINTS):
                    last.append(text)
                    on_line(text)
            code = process.wait()
        except BaseException:
            end_below(process, GRACE_S)
            raise
    if code:
        raise StageFailed(stage, code, list(last))


def _environment() -> dict[str, str]:
    """`mdc` of this installation first, lines unbuffered, bars as wide as the terminal."""
    here = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "PATH": os.pathsep.join([here, os.environ.get("PATH", os.defpath)]),
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": str(shutil.get_terminal_size((100, 24)).columns - 1),
    }
