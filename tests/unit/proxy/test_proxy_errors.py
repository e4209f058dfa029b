"""How errors look in a stream that has begun."""

import json

import pytest
from rd2h_proxy.errors import ErrorAnswer
from rd2h_proxy.failure import Blame, refused_by_engine


@pytest.mark.parametrize(
    "body",
    [
        b'{"error": {"message": "no room", "code": 500}}',
        b'{"detail": "no room"}',
        b'{"object": "error", "message": "no room", "code": 500}',
        b'"no room"',
        b"<html>no room</html>",
        b'{"error": null, "detail": "no room"}',
        b"[" * 100_000 + b"no room",
    ],
)
def test_whatever_an_engine_answered_the_event_is_one_that_clients_know_as_an_error(body: bytes) -> None:
    event = ErrorAnswer(500, body).as_sse_event()
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    error = json.loads(event.removeprefix(b"data: "))["error"]
    assert isinstance(error["message"], str)
    if len(body) < 1000:
        assert "no room" in error["message"]


@pytest.mark.parametrize(
    ("told", "passed_on"), [("3", 3), ("9" * 5000, 1), ("-1", 1), ("Wed, 21 Oct 2026 07:28:00 GMT", 1), (None, 1)]
)
def test_only_a_plain_delay_of_an_engine_is_passed_on(told: str | None, passed_on: int) -> None:
    failure = refused_by_engine(Blame.DECODE, "h:1", 503, b"{}", "application/json", told)
    assert failure.answer.retry_after_s == passed_on
