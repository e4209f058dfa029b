"""How errors look in a stream that has begun."""

import json

import pytest
from rd2h_proxy.errors import ErrorAnswer


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
