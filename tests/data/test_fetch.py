"""A request ends: by its body, by a reason, by its deadline or by its limit of bytes."""

from typing import Any

import pytest

from mdc.data.fetch import FetchFailed, Limits, fetch

LIMITS = Limits(timeout=0.6, deadline=1.0, retries=0, max_bytes=10**6, user_agent="test/1")


def reason(url: str, **options: Any) -> str:
    with pytest.raises(FetchFailed) as caught:
        fetch(url, Limits(**{**vars(LIMITS), **options}))
    return caught.value.reason


def test_a_body_comes_whole(server: Any) -> None:
    body = fetch(f"{server.address}/ok/1.png", LIMITS)
    assert body[:4] == b"\x89PNG"
    assert body[-8:-4] == b"IEND"
    assert server.agents == {"test/1"}


@pytest.mark.parametrize("path", ["drip", "drip-headers"])
def test_a_server_that_never_stops_meets_the_deadline(server: Any, path: str) -> None:
    """A byte every tenth of a second keeps within the timeout of a read for a minute."""
    assert reason(f"{server.address}/{path}") == "timeout"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("endless", "too_large"),
        ("endless-redirection", "too_large"),
        ("announced", "too_large"),
        ("status/404", "http_404"),
        ("status/503", "http_503"),
        ("cut", "incomplete"),
        ("chunks", "incomplete"),
        ("reset", "connection"),
        ("loop", "redirects"),
        ("to-file", "redirects"),
    ],
)
def test_reasons(server: Any, path: str, expected: str) -> None:
    assert reason(f"{server.address}/{path}") == expected


def test_reasons_below_http(server: Any) -> None:
    assert reason("http://127.0.0.1:1/x") == "refused"
    assert reason("http://no-such-host.invalid/x") == "dns"
    assert reason(f"https://127.0.0.1:{server.server_port}/x") == "tls"
    wrong = ["file:///etc/hostname", "ftp://host/x", "no url", "http://", "sample:///x.png", "http://[bad/x"]
    wrong += ["http://127.0.0.1:port/x", "http://" + "x" * 70 + "/", "http:///x"]
    for url in wrong:
        assert reason(url) == "bad_url", url


def test_only_what_may_pass_is_asked_again(server: Any) -> None:
    patient = Limits(**{**vars(LIMITS), "retries": 1, "deadline": 5.0})
    assert fetch(f"{server.address}/flaky/3.png", patient)[:4] == b"\x89PNG"
    with pytest.raises(FetchFailed):
        fetch(f"{server.address}/status/404", patient)
    with pytest.raises(FetchFailed):
        fetch(f"{server.address}/status/500", patient)
    assert server.requests == {"/flaky/3.png": 2, "/status/404": 1, "/status/500": 2}


def test_letters_outside_ascii_are_escaped(server: Any) -> None:
    assert reason(f"{server.address}/caf\u00e9 au lait") == "http_404"
    assert list(server.requests) == ["/caf%C3%A9%20au%20lait"]


def test_the_sample_scheme_stands_for_the_local_server(server: Any) -> None:
    limits = Limits(**{**vars(LIMITS), "sample_server": server.address})
    assert fetch("sample:///ok/5.png", limits)[:4] == b"\x89PNG"
