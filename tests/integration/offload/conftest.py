"""Fixture of a Prefill and an offloading Decode."""

import pytest
from offload_pair import DecodeRanks, PrefillRanks


@pytest.fixture
def pair():
    """Makes (Prefill of p_tp ranks, Decode of d_tp ranks)."""
    made = []

    def make(p_tp, d_tp):
        prefill = PrefillRanks(p_tp, [])
        decode = DecodeRanks(d_tp, prefill.generation)
        made.extend((prefill, decode))
        prefill.ports = decode.ports
        prefill.start()
        return prefill, decode

    yield make
    for part in made:
        part.stop()
