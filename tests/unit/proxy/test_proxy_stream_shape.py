"""Events that the proxy writes itself."""

import json

import pytest
from rd2h_proxy.stream_shape import sse


@pytest.mark.parametrize("text", ["plain", "ümlaut \U0001f600", "half \ud83d of a pair", "\udcff\u2028\\ud800"])
def test_any_text_that_json_can_hold_is_written(text: str) -> None:
    event = sse({"choices": [{"text": text}]})
    assert event.startswith(b'data: {"choices":[{"text":')
    assert event.endswith(b"\n\n")
    assert json.loads(event[6:])["choices"][0]["text"] == text
