"""A Prefill/Decode pair behind the proxy gives the tokens of one engine, and pulls exactly what it must."""

import pytest
from engine_state import idle, reset_prefix_cache, wait_idle

from rd2h.demo.cases import Case, control_cases, equality_cases
from rd2h.demo.chain import Chain, ConnectedEngine, MetaProcess
from rd2h.demo.completions import complete, post, stream
from rd2h.demo.counters import Counters, PromptCounters
from rd2h.demo.engine_spec import SERVED_NAME
from rd2h.demo.model import ModelShape
from rd2h.demo.process import ManagedProcess
from rd2h.demo.timeline import pulled_bytes

pytestmark = [pytest.mark.e2e, pytest.mark.pd, pytest.mark.timeout(300)]
CHUNK_TOKENS = 256
BLOCK_TOKENS = 16
BLOCK_BYTES = BLOCK_TOKENS * ModelShape().kv_bytes_per_token_layer * ModelShape().layers


@pytest.mark.parametrize("case", equality_cases(CHUNK_TOKENS), ids=lambda case: case.name)
def test_tokens_counters_and_bytes(
    case: Case, proxy: ManagedProcess, single: ManagedProcess, prefill: ConnectedEngine, decode: ConnectedEngine
) -> None:
    before = PromptCounters.read(decode.url)
    decode.timeline.new_events()
    expected = complete(single.url, case.body())
    assert complete(proxy.url, case.body()) == expected
    counted = PromptCounters.read(decode.url) - before
    assert counted.computed_tokens == case.children
    fresh_blocks = case.prompt_blocks(BLOCK_TOKENS) - counted.cached_tokens // BLOCK_TOKENS
    pulled = pulled_bytes(decode.timeline.new_events())
    assert pulled == fresh_blocks * BLOCK_BYTES
    assert counted.pulled_bytes == pulled
    wait_idle(prefill, decode)


def test_prompt_cached_on_prefill_but_not_on_decode_is_pulled_whole(
    proxy: ManagedProcess, single: ManagedProcess, prefill: ConnectedEngine, decode: ConnectedEngine
) -> None:
    prompt = "Prefill knows this one already. " * 20
    case = Case("cached on prefill", (prompt,))
    assert complete(proxy.url, case.body()) == complete(single.url, case.body())
    wait_idle(prefill, decode)
    reset_prefix_cache(decode)
    hits = Counters.read(prefill.url).total("vllm:prefix_cache_hits_total")
    decode.timeline.new_events()
    assert complete(proxy.url, case.body()) == complete(single.url, case.body())
    assert Counters.read(prefill.url).total("vllm:prefix_cache_hits_total") - hits >= len(prompt) - 2 * BLOCK_TOKENS
    assert pulled_bytes(decode.timeline.new_events()) == case.prompt_blocks(BLOCK_TOKENS) * BLOCK_BYTES


def test_stream_gives_the_same_tokens(proxy: ManagedProcess, single: ManagedProcess) -> None:
    body = Case("stream", ("Stream this, one token at a time, ",), max_tokens=40).body()
    pieces = list(stream(proxy.url, body))
    assert len(pieces) > 10
    assert tuple(token for piece in pieces for token in piece.token_ids) == complete(single.url, body)[0]
    assert pieces[-1].finish_reason == "length"


@pytest.mark.parametrize("choices", [1, 2])
def test_chat(proxy: ManagedProcess, single: ManagedProcess, choices: int) -> None:
    body = {
        "model": SERVED_NAME,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Why is the sky far away?"},
        ],
        "max_tokens": 24,
        "temperature": 0.7,
        "seed": 11,
        "n": choices,
    }

    def contents(url: str) -> list[str]:
        answer = post(url, "/v1/chat/completions", body)
        return [choice["message"]["content"] for choice in sorted(answer["choices"], key=lambda c: c["index"])]

    expected = contents(single.url)
    assert len(expected) == choices
    assert contents(proxy.url) == expected


def test_client_that_leaves_frees_both_engines(
    proxy: ManagedProcess, prefill: ConnectedEngine, decode: ConnectedEngine
) -> None:
    body = Case("leave", ("The guest leaves before the soup " * 9,), max_tokens=3000).body()
    pieces = stream(proxy.url, body)
    next(pieces)
    assert not idle(decode)
    pieces.close()
    wait_idle(prefill, decode)


def test_reads_suppressed_gives_other_tokens(
    chain: Chain, meta: MetaProcess, single: ManagedProcess, prefill: ConnectedEngine
) -> None:
    suppressed = chain.start_decode(meta, "decode-without-reads", extra={"debug_suppress_reads": True})
    chain.launcher.wait_engines([suppressed.process])
    control = chain.start_proxy(meta, prefill.process, suppressed.process, "control-proxy")
    try:
        for case in control_cases(CHUNK_TOKENS):
            assert complete(control.url, case.body()) != complete(single.url, case.body()), case.name
    finally:
        control.stop()
        suppressed.process.stop()


@pytest.mark.slow
def test_prefill_with_two_ranks(chain: Chain, meta: MetaProcess, single: ManagedProcess) -> None:
    prefill = chain.start_prefill(meta, "prefill-tp2", tp_size=2)
    decode = chain.start_decode(meta, "decode-of-tp2")
    chain.launcher.wait_engines([prefill.process, decode.process])
    proxy = chain.start_proxy(meta, prefill.process, decode.process, "proxy-tp2")
    try:
        for case in equality_cases(CHUNK_TOKENS):
            assert complete(proxy.url, case.body()) == complete(single.url, case.body()), case.name
    finally:
        for process in (proxy, decode.process, prefill.process):
            process.stop()
