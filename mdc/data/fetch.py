"""One HTTP request with an end: a total deadline, a limit of bytes, and a reason when it fails."""

import http.client
import io
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from email.message import Message
from functools import cache, partial
from typing import Any
from urllib.parse import quote, urlsplit

CHUNK = 2**16
RETRYABLE = {"timeout", "dns", "refused", "connection", "incomplete", "http_429"}  # and http_5xx
SAMPLE_SCHEME = "sample"


class FetchFailed(Exception):
    """`reason` is one word for counting, `detail` is for people."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(frozen=True)
class Limits:
    timeout: float  # seconds without a byte
    deadline: float  # seconds for one image, all tries together
    retries: int
    max_bytes: int
    user_agent: str
    sample_server: str = ""  # what stands for `sample://`, as http://127.0.0.1:8123


def is_retryable(reason: str) -> bool:
    """Whether the same request may succeed at another time."""
    return reason in RETRYABLE or reason.startswith("http_5")


class _Clock:
    def __init__(self, limits: Limits) -> None:
        self._timeout = limits.timeout
        self._end = time.monotonic() + limits.deadline

    def left(self) -> float:
        return self._end - time.monotonic()

    def wait(self) -> float:
        """Seconds that the next wait may take. Raises TimeoutError past the deadline."""
        if self.left() <= 0:
            raise TimeoutError("the deadline has passed")
        return min(self._timeout, self.left())


class _TimedFile(io.RawIOBase):
    """What a socket receives; a server that sends a byte now and then cannot stretch it beyond the deadline."""

    def __init__(self, sock: socket.socket, clock: _Clock) -> None:
        self._socket = sock
        self._clock = clock
        self._raw = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._socket.settimeout(self._clock.wait())
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _TimedSocket:
    """The one thing of a socket that `http.client.HTTPResponse` uses."""

    def __init__(self, sock: socket.socket, clock: _Clock) -> None:
        self._file = _TimedFile(sock, clock)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self._file, CHUNK)


def _respond(clock: _Clock, sock: socket.socket, *args: Any, **kwargs: Any) -> http.client.HTTPResponse:
    return http.client.HTTPResponse(_TimedSocket(sock, clock), *args, **kwargs)  # type: ignore[arg-type]


def _connect(kind: type[http.client.HTTPConnection], clock: _Clock, host: str, **options: Any) -> Any:
    options["timeout"] = clock.wait()
    connection = kind(host, **options)
    connection.response_class = partial(_respond, clock)  # type: ignore[assignment]
    return connection


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


class _Http(urllib.request.HTTPHandler):
    def __init__(self, clock: _Clock) -> None:
        super().__init__()
        self._clock = clock

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(_connect, http.client.HTTPConnection, self._clock), request)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, clock: _Clock) -> None:
        super().__init__(context=_tls())
        self._clock = clock

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(_connect, http.client.HTTPSConnection, self._clock), request, context=_tls())


def _opener(clock: _Clock, use_proxy: bool) -> urllib.request.OpenerDirector:
    """HTTP and HTTPS only: a list from the web must not read `file:` URLs of this machine."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(None if use_proxy else {}),
        urllib.request.UnknownHandler(),
        _Http(clock),
        _Https(clock),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    return opener


def _address(url: str, limits: Limits) -> str:
    """The URL to ask: letters that HTTP does not allow are escaped, `sample:` becomes the local server."""
    parts = urlsplit(url)
    if parts.scheme == SAMPLE_SCHEME and limits.sample_server:
        return limits.sample_server + quote(parts.path)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise FetchFailed("bad_url", "not an http or https URL")
    return quote(url, safe="!#$%&'()*+,/:;=?@[]~")


def _reason(error: BaseException) -> str:
    """One word for what went wrong below HTTP."""
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, BaseException):
        return _reason(error.reason)
    kinds: list[tuple[type[BaseException] | tuple[type[BaseException], ...], str]] = [
        (TimeoutError, "timeout"),
        (socket.gaierror, "dns"),
        (ConnectionRefusedError, "refused"),
        (ssl.SSLError, "tls"),
        (http.client.IncompleteRead, "incomplete"),
        (http.client.InvalidURL, "bad_url"),
        ((http.client.HTTPException, OSError), "connection"),
    ]
    return next((reason for kind, reason in kinds if isinstance(error, kind)), "bad_url")


def _read(response: Any, max_bytes: int) -> bytes:
    body = bytearray()
    if (response.length or 0) > max_bytes:
        raise FetchFailed("too_large", f"{response.length} bytes announced, {max_bytes} allowed")
    while chunk := response.read(CHUNK):
        body += chunk
        if len(body) > max_bytes:
            raise FetchFailed("too_large", f"more than {max_bytes} bytes")
    if response.length:
        raise FetchFailed("incomplete", f"{response.length} bytes are missing")
    return bytes(body)


def _try(url: str, limits: Limits, clock: _Clock, opted_out: Callable[[Message], bool]) -> bytes:
    opener = _opener(clock, use_proxy=not url.startswith(SAMPLE_SCHEME))
    try:
        request = urllib.request.Request(_address(url, limits), headers={"User-Agent": limits.user_agent})
        with opener.open(request, timeout=clock.wait()) as response:
            if opted_out(response.headers):
                raise FetchFailed("opted_out", "X-Robots-Tag forbids it")
            return _read(response, limits.max_bytes)
    except urllib.error.HTTPError as error:
        error.close()
        raise FetchFailed("redirects" if 300 <= error.code < 400 else f"http_{error.code}", str(error)) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise FetchFailed(_reason(error), str(error) or type(error).__name__) from None


def fetch(url: str, limits: Limits, opted_out: Callable[[Message], bool] = lambda headers: False) -> bytes:
    """The body of `url`. Raises FetchFailed within `limits.deadline` seconds (name resolution is the system's).

    Reasons: timeout, too_large, dns, refused, connection, incomplete, tls, redirects, bad_url, opted_out, http_<code>.
    opted_out: whether the response's headers forbid this use.
    """
    clock = _Clock(limits)
    for attempt in range(limits.retries + 1):
        try:
            return _try(url, limits, clock, opted_out)
        except FetchFailed as failure:
            pause = 0.25 * 2**attempt
            if attempt == limits.retries or not is_retryable(failure.reason) or clock.left() <= pause:
                raise
            time.sleep(pause)
    raise AssertionError("unreachable")
