"""One picture by HTTP with an end: a total deadline, a limit of bytes, and a reason when it fails."""

import http.client
import io
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from email.message import Message
from email.utils import parsedate_to_datetime
from functools import cache, partial
from typing import Any
from urllib.parse import quote, urlsplit

CHUNK = 2**16
REDIRECTS = 10  # at most
HEADERS = 2**20  # bytes that an answer may have beside its body
ROBOTS_BYTES = 500 * 2**10  # that are heeded (RFC 9309, section 2.5)
# and http_5xx
RETRYABLE = {"timeout", "dns", "refused", "connection", "incomplete", "http_429", "retry_after"}
RETRYABLE |= {"not_found", "unreadable"}  # of files
ASKS_TO_WAIT = {"http_429", "http_503"}
SAMPLE_SCHEME = "sample"


class FetchFailed(Exception):
    """`reason` is one word for counting, `detail` is for people."""

    def __init__(self, reason: str, detail: str, retry_after: float | None = None) -> None:
        """retry_after: seconds for which the server asks to be left alone."""
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.retry_after = retry_after


class Manners:
    """How hosts are treated. These are none; `mdc.data.manners` has those for the hosts of others."""

    def turn(self, url: str) -> AbstractContextManager[None]:
        """Held while a request to the URL's host runs. Raises FetchFailed where there is no turn within reason."""
        return nullcontext()

    def check(self, url: str, get: Callable[[str], bytes]) -> None:
        """Raise FetchFailed where the host does not want the URL asked for. get: the body of another of its URLs."""

    def opted_out(self, headers: Message) -> bool:
        """Whether the headers of an answer forbid its use."""
        return False

    def pause(self, url: str, seconds: float) -> None:
        """The host asks to be left alone for a time."""


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
    """The time that one picture may take, waiting for a turn not counted, and the bytes of each of its tries."""

    def __init__(self, limits: Limits) -> None:
        self._timeout = limits.timeout
        self._most = limits.max_bytes + HEADERS
        self._end = time.monotonic() + limits.deadline

    def left(self) -> float:
        return self._end - time.monotonic()

    def wait(self) -> float:
        """Seconds that the next wait may take. Raises TimeoutError past the deadline."""
        if self.left() <= 0:
            raise TimeoutError("the deadline has passed")
        return min(self._timeout, self.left())

    def check_size(self, received: int) -> None:
        """Raise FetchFailed (too_large). Bodies of redirections are read as well, by urllib and to their end."""
        if received > self._most:
            raise FetchFailed("too_large", f"more than {self._most} bytes")

    def stopped_since(self, moment: float) -> None:
        self._end += time.monotonic() - moment


class _TimedFile(io.RawIOBase):
    """What a socket receives; a server that sends a byte now and then cannot stretch it beyond the deadline."""

    def __init__(self, sock: socket.socket, clock: _Clock) -> None:
        self._socket = sock
        self._clock = clock
        self._raw = sock.makefile("rb", buffering=0)
        self._received = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._socket.settimeout(self._clock.wait())
        size = self._raw.readinto(buffer)
        self._received += size or 0
        self._clock.check_size(self._received)
        return size

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


class _Request(urllib.request.Request):
    """A request with its clock, and what is asked before each redirection."""

    def __init__(self, url: str, user_agent: str, clock: _Clock, check: Callable[[str], None]) -> None:
        super().__init__(url, headers={"User-Agent": user_agent})
        self.clock, self.check, self.user_agent = clock, check, user_agent


class _Http(urllib.request.HTTPHandler):
    def http_open(self, request: Any) -> http.client.HTTPResponse:
        return self.do_open(partial(_connect, http.client.HTTPConnection, request.clock), request)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self) -> None:
        super().__init__(context=_tls())

    def https_open(self, request: Any) -> http.client.HTTPResponse:
        return self.do_open(partial(_connect, http.client.HTTPSConnection, request.clock), request, context=_tls())


class _Redirects(urllib.request.HTTPRedirectHandler):
    max_redirections = REDIRECTS

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> _Request | None:
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is None:
            return None
        req.check(request.full_url)
        return _Request(request.full_url, req.user_agent, req.clock, req.check)


@cache
def _opener(use_proxy: bool) -> urllib.request.OpenerDirector:
    """HTTP and HTTPS only: a list from the web must not read `file:` URLs of this machine."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(None if use_proxy else {}),
        urllib.request.UnknownHandler(),
        _Http(),
        _Https(),
        urllib.request.HTTPDefaultErrorHandler(),
        _Redirects(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    return opener


def _address(url: str, limits: Limits) -> str:
    """The URL to ask: letters that HTTP does not allow are escaped, `sample:` becomes the local server."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise FetchFailed("bad_url", str(error)) from None
    if parts.scheme == SAMPLE_SCHEME and limits.sample_server:
        return limits.sample_server + quote(parts.path)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise FetchFailed("bad_url", "not an http or https URL")
    return quote(url, safe="!#$%&'()*+,/:;=?@[]~")


def _is_ours(address: str, limits: Limits) -> bool:
    """Whether the sample's own server is asked, which needs neither a proxy nor manners."""
    return bool(limits.sample_server) and address.startswith(limits.sample_server)


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


def _retry_after(headers: Message) -> float | None:
    """Seconds, from a number of them or a date (RFC 9110, section 10.2.3); None where the header says neither."""
    value = str(headers.get("Retry-After", "")).strip()
    if value.isdecimal():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None


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


def _read_start(response: Any, size: int) -> bytes:
    body = bytearray()
    while len(body) < size and (chunk := response.read(min(CHUNK, size - len(body)))):
        body += chunk
    return bytes(body)


def _get(url: str, limits: Limits, clock: _Clock, check: Callable[[str], None], read: Callable[[Any], bytes]) -> bytes:
    """One request and its redirections. Raises FetchFailed."""
    try:
        request = _Request(url, limits.user_agent, clock, check)
        with _opener(use_proxy=not _is_ours(url, limits)).open(request, timeout=clock.wait()) as response:
            return read(response)
    except urllib.error.HTTPError as error:
        error.close()
        reason = "redirects" if 300 <= error.code < 400 else f"http_{error.code}"
        raise FetchFailed(reason, str(error), _retry_after(error.headers)) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise FetchFailed(_reason(error), str(error) or type(error).__name__) from None


def _try(url: str, limits: Limits, clock: _Clock, manners: Manners) -> bytes:
    """One try in its turn. What the host says about its visitors is asked first, on a clock of its own."""

    def other(of_host: str) -> bytes:
        return _get(of_host, limits, _Clock(limits), lambda _: None, lambda answer: _read_start(answer, ROBOTS_BYTES))

    def check(asked: str) -> None:
        moment = time.monotonic()
        manners.check(asked, other)
        clock.stopped_since(moment)

    def read(response: Any) -> bytes:
        if manners.opted_out(response.headers):
            raise FetchFailed("opted_out", "X-Robots-Tag forbids it")
        return _read(response, limits.max_bytes)

    moment = time.monotonic()
    with manners.turn(url):
        clock.stopped_since(moment)
        check(url)
        return _get(url, limits, clock, check, read)


NO_MANNERS = Manners()


def fetch(url: str, limits: Limits, manners: Manners = NO_MANNERS) -> bytes:
    """The body of `url`. Raises FetchFailed within `limits.deadline` seconds, waiting for turns not counted.

    Name resolution takes what time the system gives it. Reasons: timeout, too_large, dns, refused, connection,
    incomplete, tls, redirects, bad_url, http_<code>, opted_out, and those of `manners`: robots, retry_after.
    """
    address = _address(url, limits)
    manners = NO_MANNERS if _is_ours(address, limits) else manners
    clock = _Clock(limits)
    for attempt in range(limits.retries + 1):
        try:
            return _try(address, limits, clock, manners)
        except FetchFailed as failure:
            pause = 0.25 * 2**attempt
            if failure.reason in ASKS_TO_WAIT:
                manners.pause(address, pause if failure.retry_after is None else failure.retry_after)
            if attempt == limits.retries or not is_retryable(failure.reason) or clock.left() <= pause:
                raise
            time.sleep(pause)
    raise AssertionError("unreachable")
