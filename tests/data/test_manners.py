"""How hosts are treated: turns, waiting when asked to, robots.txt and opt-outs, over threads and processes alike."""

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mdc.config import DownloadParams
from mdc.data.fetch import FetchFailed, Limits, fetch
from mdc.data.manners import SharedManners

LIMITS = Limits(timeout=2.0, deadline=4.0, retries=0, max_bytes=10**6, user_agent="Finder/1 (+http://h/about)")
PNG = b"\x89PNG"


@pytest.fixture
def manners(tmp_path: Path) -> SharedManners:
    return SharedManners.of(DownloadParams(user_agent=LIMITS.user_agent, per_host=3, longest_wait=5), tmp_path)


def reason(url: str, manners: SharedManners, limits: Limits = LIMITS) -> str:
    try:
        return "ok" if fetch(url, limits, manners)[:4] == PNG else "no picture"
    except FetchFailed as failure:
        return failure.reason


def reasons(urls: list[str], manners: SharedManners, limits: Limits) -> list[str]:
    """In twelve threads."""
    with ThreadPoolExecutor(12) as pool:
        return list(pool.map(lambda url: reason(url, manners, limits), urls))


def test_a_host_gets_so_many_requests_at_a_time_from_all_processes(server: Any, manners: SharedManners) -> None:
    server.seconds = 0.05
    urls = [f"{server.address}/ok/{i}" for i in range(60)]
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        halves = pool.map(partial(reasons, manners=manners, limits=LIMITS), [urls[::2], urls[1::2]])
        assert [one for half in halves for one in half] == ["ok"] * 60
    assert max(server.most_active.values()) == 3


def test_another_host_has_turns_of_its_own_and_no_limit_is_none(server: Any, manners: SharedManners) -> None:
    server.seconds = 0.2
    urls = [f"{address}/ok/{i}" for i in range(6) for address in (server.address, server.other_address)]
    assert reasons(urls, manners, LIMITS) == ["ok"] * 12
    assert len(server.most_active) == 2
    assert max(server.most_active.values()) <= 3
    server.reset()
    server.seconds = 0.2
    assert reasons(urls, replace(manners, per_host=0), LIMITS) == ["ok"] * 12
    assert max(server.most_active.values()) > 3


def test_retry_after_is_waited_for_by_all_requests_to_the_host(server: Any, manners: SharedManners) -> None:
    patient = replace(LIMITS, retries=1, deadline=0.9)  # waiting does not count
    assert reason(f"{server.address}/busy/1", manners, patient) == "ok"
    one, two = server.times["/busy/1"]
    assert two - one >= 1.0
    manners.pause(f"{server.address}/x", 1.0)
    start = time.monotonic()
    assert reason(f"{server.address}/ok/2", manners) == "ok"
    assert reason(f"{server.other_address}/ok/3", manners) == "ok"
    assert server.times["/ok/2"][0] - start >= 0.9


def test_a_host_that_wants_to_be_left_alone_for_long_is(server: Any, manners: SharedManners) -> None:
    assert reason(f"{server.address}/closed/1", manners, replace(LIMITS, retries=3)) == "retry_after"
    assert reasons([f"{server.address}/ok/{i}" for i in range(20)], manners, LIMITS) == ["retry_after"] * 20
    assert server.requests == {"/closed/1": 1}
    assert reason(f"{server.other_address}/ok/1", manners) == "ok"


@pytest.mark.parametrize(
    ("header", "expected"), [("2", 2), (" 0 ", 0), ("Mon, 01 Jan 2001 00:00:00 GMT", 0), ("soon", None), ("-3", None)]
)
def test_retry_after_is_seconds_or_a_date(header: str, expected: float | None) -> None:
    from email.message import Message

    from mdc.data.fetch import _retry_after

    message = Message()
    message["Retry-After"] = header
    assert _retry_after(message) == expected
    assert _retry_after(Message()) is None


ROBOTS = """
User-agent: *
Disallow: /ok/secret
Allow: /ok/1

User-agent: finder
Disallow: /ok/*/x$
Disallow: /to

User-agent: img2dataset
Disallow: /ok/9
"""


def test_robots_txt_is_asked_for_once_per_host_and_heeded(server: Any, manners: SharedManners) -> None:
    server.robots = ROBOTS
    assert reasons([f"{server.address}/ok/{i}" for i in range(9)], manners, LIMITS) == ["ok"] * 9
    assert list(server.robots_requests.values()) == [1]
    for path in ("ok/1/x", "to/ok/1", "ok/9"):
        assert reason(f"{server.address}/{path}", manners) == "robots", path
        assert f"/{path}" not in server.requests
    again = replace(manners)  # as another process that shares the folder
    assert reason(f"{server.address}/ok/3/x", again) == "robots"
    assert list(server.robots_requests.values()) == [1]
    assert reason(f"{server.address}/ok/1/x", replace(manners, robots=False)) == "ok"


def test_another_name_has_other_rules(server: Any, manners: SharedManners, tmp_path: Path) -> None:
    server.robots = "User-agent: finder\nDisallow: /\n"
    assert reason(f"{server.address}/ok/1", manners) == "robots"
    assert reason(f"{server.address}/ok/1", replace(manners, user_agent="other/2")) == "ok"


def test_a_redirection_to_another_host_obeys_that_hosts_rules(server: Any, manners: SharedManners) -> None:
    assert reason(f"{server.address}/to/ok/4", manners) == "ok"
    assert len(server.robots_requests) == 2
    server.reset()
    server.robots = "User-agent: *\nDisallow: /ok/5\n"
    fresh = SharedManners.of(DownloadParams(per_host=3), manners.folder / "fresh")
    assert reason(f"{server.address}/to/ok/5", fresh) == "robots"
    assert "/ok/5" not in server.requests


def test_without_an_answer_about_robots_nothing_is_asked(server: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """RFC 9309: a server error forbids everything for now, and a missing file nothing."""
    manners = SharedManners.of(DownloadParams(), tmp_path)

    def answering(reason: str) -> Any:
        def get(url: str) -> bytes:
            raise FetchFailed(reason, "as told")

        return get

    for reason in ("http_500", "http_429", "timeout", "dns"):
        with pytest.raises(FetchFailed, match=reason):
            manners.check("http://h/a.png", answering(reason))
    for number, reason in enumerate(("http_404", "http_403", "http_410", "redirects")):
        manners.check(f"http://h{number}/a.png", answering(reason))
    manners.check("http://binary/a.png", lambda _: b"\xff\xfe\0 no robots at all")


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("noai", "opted_out"),
        ("NoImageAI, nofollow", "opted_out"),
        ("none", "opted_out"),
        ("finder: noindex", "opted_out"),
        ("img2dataset: noai", "opted_out"),
        ("otherbot: noai", "ok"),
        ("nofollow", "ok"),
    ],
)
def test_opt_outs(server: Any, manners: SharedManners, header: str, expected: str) -> None:
    url = f"{server.address}/opted-out/{header.replace(' ', '%20')}"
    assert reason(url, manners) == expected
    assert reason(url, replace(manners, opt_outs=())) == "ok"
