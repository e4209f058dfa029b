"""Time limits of the two sides must fit: Decode's read lease may not outlast Prefill's patience."""

import pytest

from rd2h.decode.book import Answer, PullBook
from rd2h.decode.destination import Destination
from rd2h.decode.options import PullerOptions
from rd2h.decode.router import Received
from rd2h.layout import CacheLayout, LayerLayout, TensorLayout, encode_layer_map
from rd2h.stats import TransferStats
from rd2h.wire import MfAck, MfMeta, PeerInfo, decode_from_decode, decode_from_prefill, encode_mf_meta

GENERATION, PREFILL = 5, 9


def answer_to(prefill_ms: int, decode_s: float) -> Answer:
    layout = CacheLayout((LayerLayout("l.0", (TensorLayout(0x1000, 64, 8),), None, None),))
    options = PullerOptions("127.0.0.1", 0, GENERATION, b"", 1, peer_timeout_s=decode_s)
    book = PullBook(options, Destination(layout, 0, 1, False), TransferStats())
    meta = encode_mf_meta("session", encode_layer_map(layout), PeerInfo(1, PREFILL, b"", 1, 0, prefill_ms))
    connection, _ = book.accept(Received(b"peer", meta, "127.0.0.1"), 0.0, 0)
    assert connection is not None
    step = book.next_step(connection, 0.0, 1)
    assert isinstance(step, Answer)
    return step


@pytest.mark.parametrize(("prefill_ms", "decode_s"), [(20_000, 20.0), (30_000, 20.0), (0, 20.0), (100, 0.1)])
def test_a_prefill_that_waits_at_least_as_long_is_read_from(prefill_ms: int, decode_s: float) -> None:
    assert answer_to(prefill_ms, decode_s).open_session == "session"


@pytest.mark.parametrize(("prefill_ms", "decode_s"), [(19_999, 20.0), (1, 20.0)])
def test_a_less_patient_prefill_is_refused_with_both_values(prefill_ms: int, decode_s: float) -> None:
    """It would free its blocks while this side still believes what it reads from them."""
    refused = answer_to(prefill_ms, decode_s)
    assert refused.open_session is None
    message = decode_from_decode(refused.payloads[0])
    assert isinstance(message, MfAck)
    assert message.error == f"peer_timeout_s is {prefill_ms / 1000:g} on Prefill, 20 on Decode"


def test_what_is_not_said_takes_no_bytes() -> None:
    """A peer without the field must be told the same bytes as before."""
    silent, said = PeerInfo(1, PREFILL, b"", 2, 1), PeerInfo(1, PREFILL, b"", 2, 1, 20_000)
    assert b"p_to" not in encode_mf_meta("s", b"", silent)
    for info in (silent, said):
        assert decode_from_prefill(encode_mf_meta("s", b"", info)) == MfMeta("s", b"", info)
