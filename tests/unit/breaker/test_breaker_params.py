"""Parameters that JSON can carry and no encoder can: they must be refused, not raise in the engine's loop."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "connector"))

from connector_standins import child_params, dispatch

from rd2h.errors import RequestError
from rd2h.params import parse_remote_decodes, parse_remote_prefill

LONE = "a\ud800b"
"""What json.loads makes of "a\\ud800b"."""


@pytest.mark.parametrize("key", ["request_id", "remote_engine_id", "remote_host"])
def test_a_child_with_text_that_cannot_be_encoded_is_refused(key: str) -> None:
    remote = parse_remote_decodes(dispatch({**child_params(), key: LONE}))
    assert remote.children == ()
    (broken,) = remote.broken
    assert key in broken.reason
    # What is told about it must be sendable itself.
    (broken.request_id + broken.reason).encode()


@pytest.mark.parametrize("key", ["rendezvous_id", "x_request_id"])
def test_a_rendezvous_with_text_that_cannot_be_encoded_is_refused(key: str) -> None:
    given: dict[str, Any] = {"rendezvous_id": "rv", "x_request_id": "x", key: LONE}
    with pytest.raises(RequestError, match=key):
        parse_remote_prefill(given)


@pytest.mark.parametrize("rendezvous_id", [LONE, "r" * 129, 7, None, ""])
def test_prefill_reports_nothing_to_a_rendezvous_that_cannot_be_one(rendezvous_id: object) -> None:
    """The children may be served all the same; only the report of a failure has no address."""
    remote = parse_remote_decodes(dispatch(child_params(), rendezvous_id=rendezvous_id))
    assert remote.rendezvous_id == ""
    assert len(remote.children) == 1
