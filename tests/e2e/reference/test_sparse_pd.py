"""Prefill to Decode, paged caches on both sides: main and indexer are pulled, tokens are those of one engine."""

import pytest

from rd2h.demo.cases import Case, control_cases, equality_cases
from rd2h.demo.chain import Chain, ConnectedEngine, MetaProcess
from rd2h.demo.completions import complete
from rd2h.demo.counters import PromptCounters
from rd2h.demo.process import ManagedProcess
from rd2h.demo.timeline import pulled_bytes
from rd2h.reference.launch import BLOCK_TOKENS
from rd2h.reference.weights import SparseShape

pytestmark = [pytest.mark.e2e, pytest.mark.pd, pytest.mark.timeout(300)]
CHUNK_TOKENS = 256
SHAPE = SparseShape()
BLOCK_BYTES = BLOCK_TOKENS * (SHAPE.main_bytes_per_token + SHAPE.indexer_bytes_per_token)


@pytest.fixture(scope="module")
def sparse_proxy(
    sparse_chain: Chain, sparse_meta: MetaProcess, sparse_prefill: ConnectedEngine, sparse_decode: ConnectedEngine
) -> ManagedProcess:
    return sparse_chain.start_proxy(sparse_meta, sparse_prefill.process, sparse_decode.process, "sparse-proxy")


@pytest.mark.parametrize("case", equality_cases(CHUNK_TOKENS), ids=lambda case: case.name)
def test_sparse_tokens_and_bytes(
    case: Case, sparse_proxy: ManagedProcess, sparse_single: ManagedProcess, sparse_decode: ConnectedEngine
) -> None:
    before = PromptCounters.read(sparse_decode.url)
    sparse_decode.timeline.new_events()
    assert complete(sparse_proxy.url, case.body()) == complete(sparse_single.url, case.body())
    counted = PromptCounters.read(sparse_decode.url) - before
    assert counted.computed_tokens == case.children
    fresh_blocks = case.prompt_blocks(BLOCK_TOKENS) - counted.cached_tokens // BLOCK_TOKENS
    assert pulled_bytes(sparse_decode.timeline.new_events()) == fresh_blocks * BLOCK_BYTES


def test_sparse_tokens_differ_when_nothing_is_read(
    sparse_chain: Chain, sparse_meta: MetaProcess, sparse_single: ManagedProcess, sparse_prefill: ConnectedEngine
) -> None:
    suppressed = sparse_chain.start_decode(sparse_meta, "sparse-without-reads", extra={"debug_suppress_reads": True})
    sparse_chain.launcher.wait_engines([suppressed.process])
    control = sparse_chain.start_proxy(sparse_meta, sparse_prefill.process, suppressed.process, "sparse-control-proxy")
    try:
        for case in control_cases(CHUNK_TOKENS):
            assert complete(control.url, case.body()) != complete(sparse_single.url, case.body()), case.name
    finally:
        control.stop()
        suppressed.process.stop()
