"""The event reader gives the same events however the bytes are cut."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rd2h_proxy.sse import SseOverflowError, SseReader, event_data

STREAM = (
    b': hello\n\ndata: {"a": 1}\n\ndata: one\ndata: two\n\nevent: x\r\ndata: crlf\r\n\r\ndata: [DONE]\n\ndata: rest'
)


@given(st.lists(st.integers(1, len(STREAM) - 1), max_size=20))
def test_any_chunking_gives_the_same_events(cuts: list[int]) -> None:
    reader = SseReader(1000)
    events = []
    edges = [0, *sorted(set(cuts)), len(STREAM)]
    for start, end in pairwise(edges):
        events += reader.feed(STREAM[start:end])
    assert b"".join(events) + reader.rest == STREAM
    assert [event_data(event) for event in events] == [None, b'{"a": 1}', b"one\ntwo", b"crlf", b"[DONE]"]
    assert reader.rest == b"data: rest"


def test_an_endless_event_is_refused() -> None:
    reader = SseReader(100)
    for _ in range(4):
        assert reader.feed(b"data: xxxxxxxxxxxxxxxx") == []
    with pytest.raises(SseOverflowError):
        reader.feed(b"data: xxxxxxxxxxxxxxxx")
