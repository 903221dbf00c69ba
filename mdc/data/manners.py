"""Good manners towards the hosts of a list: few requests at a time, waiting when asked to, robots.txt, opt-outs.

All processes of a download share what they know through files, so that the limits hold over all of them, and on a
cluster over all nodes that see the folder. The kernel takes locks back from a process that ends, however it ends.
"""

import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from functools import cached_property
from pathlib import Path
from urllib.parse import urlsplit

from protego import Protego

from mdc.config import DownloadParams
from mdc.data.borrowed import is_disallowed
from mdc.data.fetch import FetchFailed, Manners

STRIPES = 1024  # hosts of one stripe share the limit, so that there are not as many files as hosts
ROBOTS_S = 24 * 3600.0  # that an answer is used for (RFC 9309, section 2.4)
ALSO_ADDRESSED = "img2dataset"  # rules for it are meant for this use of it, whatever name it goes by
WITHOUT = {"redirects"}  # a host whose robots.txt leads nowhere has none
_reading: dict[str, threading.Lock] = {}  # by origin: one thread asks, the others wait for its answer
_known: dict[str, tuple[float, Protego]] = {}  # by file: when it was written, and its rules


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=12).digest()


def _put(path: Path, text: str) -> None:
    """Readers in other processes see all of it or nothing."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


@dataclass(frozen=True)
class SharedManners(Manners):
    """folder: seen by all processes of a run."""

    folder: Path
    user_agent: str
    per_host: int  # requests at a time; 0 = no limit
    longest_wait: float  # seconds
    robots: bool
    opt_outs: tuple[str, ...]

    @classmethod
    def of(cls, params: DownloadParams, folder: Path) -> "SharedManners":
        opt_outs = tuple(word.strip().lower() for word in params.opt_out)
        folder = folder.absolute()
        for name in ("turns", "pauses", "robots"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        return cls(folder, params.user_agent, params.per_host, params.longest_wait, params.robots, opt_outs)

    @cached_property
    def _names(self) -> list[str]:
        """What robots.txt and X-Robots-Tag may call us."""
        return [self.user_agent.split("/")[0].strip().lower(), ALSO_ADDRESSED]

    @contextmanager
    def turn(self, url: str) -> Iterator[None]:
        """At most `per_host` at a time. FetchFailed: retry_after, where the host is to be left alone for long."""
        host = urlsplit(url).netloc.lower()
        if not self.per_host:
            self._wait(host)
            yield
            return
        stripe = int.from_bytes(_digest(host)[:4], "big") % STRIPES
        slot = int.from_bytes(_digest(url)[:4], "big") % self.per_host
        with (self.folder / "turns" / f"{stripe:03x}-{slot}").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._wait(host)
            yield

    def _pause(self, host: str) -> Path:
        return self.folder / "pauses" / _digest(host).hex()

    def _wait(self, host: str) -> None:
        waited = 0.0
        while (left := self._until(host) - time.time()) > 0:
            waited += left
            if waited > self.longest_wait:
                raise FetchFailed("retry_after", f"the host asks to be left alone for {left:.0f} s")
            time.sleep(left)

    def _until(self, host: str) -> float:
        try:
            return float(self._pause(host).read_text())
        except FileNotFoundError:
            return 0.0

    def pause(self, url: str, seconds: float) -> None:
        host = urlsplit(url).netloc.lower()
        if (until := time.time() + seconds) > self._until(host):
            _put(self._pause(host), repr(until))

    def check(self, url: str, get: Callable[[str], bytes]) -> None:
        """Raise FetchFailed: robots, where robots.txt forbids it; or why robots.txt could not be had (RFC 9309)."""
        if not self.robots:
            return
        parts = urlsplit(url)
        rules = self._rules(f"{parts.scheme}://{parts.netloc.lower()}", get)
        if not all(rules.can_fetch(url, name) for name in self._names):
            raise FetchFailed("robots", "robots.txt forbids it")

    def _rules(self, origin: str, get: Callable[[str], bytes]) -> Protego:
        path = self.folder / "robots" / _digest(origin).hex()
        with _reading.setdefault(origin, threading.Lock()):
            written, rules = _known.get(str(path), (0.0, None))
            if rules is None or written < time.time() - ROBOTS_S:
                text = self._kept(path)
                if text is None:
                    text = self._ask(origin, get)
                    _put(path, text)
                rules = Protego.parse(text)
                _known[str(path)] = path.stat().st_mtime, rules
            return rules

    @staticmethod
    def _kept(path: Path) -> str | None:
        """What another process, or another run, has read."""
        try:
            return path.read_text(encoding="utf-8") if path.stat().st_mtime > time.time() - ROBOTS_S else None
        except FileNotFoundError:
            return None

    @staticmethod
    def _ask(origin: str, get: Callable[[str], bytes]) -> str:
        try:
            return get(f"{origin}/robots.txt").decode("utf-8", "replace")
        except FetchFailed as failure:
            is_there_none = failure.reason.startswith("http_4") or failure.reason in WITHOUT
            if is_there_none and failure.reason != "http_429":
                return ""
            raise FetchFailed(failure.reason, f"robots.txt: {failure}", failure.retry_after) from None

    def opted_out(self, headers: Message) -> bool:
        """Whether `X-Robots-Tag` holds one of the words, for everybody or for us."""
        return any(is_disallowed(headers, name, self.opt_outs) for name in self._names)
