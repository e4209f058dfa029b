"""Decode with main KV in a host pool gives the tokens of one ordinary engine, whatever comes and goes."""

import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest

from rd2h.demo.cases import Case, control_cases, equality_cases
from rd2h.demo.chain import Chain, ConnectedEngine, MetaProcess
from rd2h.demo.completions import complete, stream
from rd2h.demo.counters import Counters, PromptCounters
from rd2h.demo.engine_spec import MIB, SERVED_NAME
from rd2h.demo.lifetime import LaunchError
from rd2h.demo.process import ManagedProcess
from rd2h.demo.timeline import pulled_bytes
from rd2h.reference.launch import BLOCK_TOKENS, offload_args
from rd2h.reference.weights import SparseShape

pytestmark = [pytest.mark.e2e, pytest.mark.pd, pytest.mark.timeout(300)]
CHUNK_TOKENS = 256
SHAPE = SparseShape()
BLOCK_BYTES = BLOCK_TOKENS * (SHAPE.main_bytes_per_token + SHAPE.indexer_bytes_per_token)
SETTLE_S = 20.0
TEXT = "Whoever keeps a cache by the sea should know which of its shells are asked for and which only look pretty. "
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 47, 64, 65, 255, 256, 257, 700, 1999, 2000)


def body(prompt: str | list[str], max_tokens: int = 24) -> dict[str, Any]:
    return {
        "model": SERVED_NAME,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def prompt_of(length: int, first: str = "") -> str:
    return (first + TEXT * (length // len(TEXT) + 1))[:length]


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SETTLE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {SETTLE_S} s: {what}"
        time.sleep(0.05)


def idle(engine: ConnectedEngine) -> bool:
    page = Counters.read(engine.url)
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    return all(page.total(name) == 0 for name in names)


def blocks_of(url: str) -> int:
    """Number of KV blocks of an engine."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=20) as answer:
        found = re.search(r'vllm:cache_config_info\{.*?num_gpu_blocks="(\d+)"', answer.read().decode())
    assert found is not None
    return int(found[1])


@dataclass(frozen=True)
class OffloadCount:
    """What the Decode engine has counted so far."""

    hits: float
    misses: float
    evictions: float
    appended: float

    @classmethod
    def read(cls, engine: ConnectedEngine) -> "OffloadCount":
        page = Counters.read(engine.url)
        names = ("hits", "misses", "evictions", "rows_appended")
        return cls(*(page.total_so_far(f"rd2h_offload_{name}_total") for name in names))


@pytest.fixture(scope="module", params=[1, 2, 4], ids=lambda factor: f"buffer={factor}xtopk")
def offload(
    request: pytest.FixtureRequest,
    sparse_chain: Chain,
    sparse_meta: MetaProcess,
    sparse_prefill: ConnectedEngine,
    start_offload: Any,
) -> Iterator[Any]:
    """One Decode engine after the other, with a hot buffer from exactly top-k up to four times as large."""
    tokens = request.param * SHAPE.index_topk
    pair = start_offload(sparse_chain, sparse_meta, sparse_prefill, f"offload-{request.param}", tokens)
    yield pair
    pair.stop()


@pytest.mark.parametrize("case", equality_cases(CHUNK_TOKENS), ids=lambda case: case.name)
def test_offload_tokens_and_bytes(case: Case, offload: Any, sparse_single: ManagedProcess) -> None:
    before = PromptCounters.read(offload.decode.url)
    offload.decode.timeline.new_events()
    assert complete(offload.url, case.body()) == complete(sparse_single.url, case.body())
    counted = PromptCounters.read(offload.decode.url) - before
    assert counted.computed_tokens == case.children
    fresh_blocks = case.prompt_blocks(BLOCK_TOKENS) - counted.cached_tokens // BLOCK_TOKENS
    assert pulled_bytes(offload.decode.timeline.new_events()) == fresh_blocks * BLOCK_BYTES


def test_prompts_of_1_to_2000_tokens(offload: Any, sparse_single: ManagedProcess) -> None:
    for length in LENGTHS:
        question = body(prompt_of(length, f"{length}"))
        assert complete(offload.url, question) == complete(sparse_single.url, question), length


def test_batches_of_1_to_8_with_different_lengths(offload: Any, sparse_single: ManagedProcess) -> None:
    lengths = (5, 300, 33, 16, 1000, 64, 1, 129)
    for size in range(1, 9):
        question = body([prompt_of(length, f"batch {size} ") for length in lengths[:size]])
        assert complete(offload.url, question) == complete(sparse_single.url, question), size


def test_requests_that_join_and_leave_a_running_batch(offload: Any, sparse_single: ManagedProcess) -> None:
    questions = [body(prompt_of(20 + 67 * i, f"guest {i} "), 5 + 11 * i) for i in range(8)]
    before = OffloadCount.read(offload.decode)
    with ThreadPoolExecutor(len(questions)) as pool:
        got = list(pool.map(lambda question: complete(offload.url, question), questions))
    assert got == [complete(sparse_single.url, question) for question in questions]
    after = OffloadCount.read(offload.decode)
    assert after.hits > before.hits
    assert after.misses > before.misses
    assert after.evictions > before.evictions
    assert after.appended > before.appended


def test_prompts_that_decode_must_compute_itself(offload: Any, sparse_single: ManagedProcess) -> None:
    """Asked directly, without a Prefill: more tokens a step than the hot buffer has rows, in several chunks."""
    for length in (1, 33, 300, 700):
        question = body(prompt_of(length, f"by itself {length} "), 40)
        assert complete(offload.decode.url, question) == complete(sparse_single.url, question), length


def test_clients_that_leave_do_not_disturb_the_others(offload: Any, sparse_single: ManagedProcess) -> None:
    for round_number in range(3):
        leaving = stream(offload.url, body(prompt_of(400, f"leaving {round_number} "), 2000))
        next(leaving)
        staying = body(prompt_of(350, f"staying {round_number} "), 40)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(complete, offload.url, staying)
            next(leaving)
            leaving.close()
            assert answer.result() == complete(sparse_single.url, staying)
    wait_for(lambda: idle(offload.decode), "Decode idle after its clients left")


@pytest.fixture(scope="module")
def crowded(
    sparse_chain: Chain, sparse_meta: MetaProcess, sparse_prefill: ConnectedEngine, start_offload: Any
) -> Iterator[Any]:
    """A Decode engine with so few blocks that running requests push each other out."""
    pair = start_offload(
        sparse_chain,
        sparse_meta,
        sparse_prefill,
        "offload-crowded",
        2 * SHAPE.index_topk,
        ("--num-gpu-blocks-override", "44"),
        max_model_len=512,
        max_num_seqs=8,
    )
    yield pair
    pair.stop()


def test_preempted_requests_resume_with_the_same_tokens(crowded: Any, sparse_single: ManagedProcess) -> None:
    questions = [body(prompt_of(90 + 10 * i, f"squeezed {i} "), 200) for i in range(4)]
    with ThreadPoolExecutor(len(questions)) as pool:
        got = list(pool.map(lambda question: complete(crowded.url, question), questions))
    assert Counters.read(crowded.decode.url).total("vllm:num_preemptions_total") > 0
    assert got == [complete(sparse_single.url, question) for question in questions]
    wait_for(lambda: idle(crowded.decode), "all blocks free")


def test_block_budget_follows_the_indexer(offload: Any, sparse_single: ManagedProcess) -> None:
    ordinary, offloading = blocks_of(sparse_single.url), blocks_of(offload.decode.url)
    # The same device memory, less the hot buffers, divided by what the indexer alone needs.
    ratio = 1 + SHAPE.main_bytes_per_token / SHAPE.indexer_bytes_per_token
    assert 0.75 * ratio < offloading / ordinary <= ratio


def test_reads_suppressed_gives_other_tokens_from_the_pool(
    sparse_chain: Chain, sparse_meta: MetaProcess, sparse_single: ManagedProcess, sparse_prefill: ConnectedEngine
) -> None:
    changes = {"extra_args": offload_args(2 * SHAPE.index_topk)}
    suppressed = sparse_chain.start_decode(
        sparse_meta, "offload-without-reads", extra={"debug_suppress_reads": True}, changes=changes
    )
    sparse_chain.launcher.wait_engines([suppressed.process])
    control = sparse_chain.start_proxy(sparse_meta, sparse_prefill.process, suppressed.process, "offload-control")
    try:
        for case in control_cases(CHUNK_TOKENS):
            assert complete(control.url, case.body()) != complete(sparse_single.url, case.body()), case.name
    finally:
        control.stop()
        suppressed.process.stop()


def test_pool_smaller_than_needed_is_a_start_up_error_with_both_numbers(
    sparse_chain: Chain, sparse_meta: MetaProcess
) -> None:
    changes = {"extra_args": offload_args(2 * SHAPE.index_topk), "kv_cache_bytes": 192 * MIB}
    decode = sparse_chain.start_decode(sparse_meta, "offload-too-large", changes=changes)
    with pytest.raises(LaunchError):
        sparse_chain.launcher.wait_engines([decode.process])
    log = decode.process.log_path.read_text()
    assert "dram_size_per_dp_GB=1 is too small: main KV needs" in log
    assert f"allowed are {1 << 30} bytes" in log


@pytest.fixture(scope="module")
def int8_chain(make_sparse_chain: Any) -> Chain:
    chain: Chain = make_sparse_chain(SparseShape(index_int8=True))
    return chain


def test_int8_indexer_with_scale(int8_chain: Chain, start_offload: Any) -> None:
    shape = SparseShape(index_int8=True)
    meta = int8_chain.start_meta()
    single, prefill = int8_chain.start_single("int8-single"), int8_chain.start_prefill(meta, "int8-prefill")
    int8_chain.launcher.wait_engines([single, prefill.process])
    # An int8 indexer lets the device index so many blocks that less of it needs a host pool of a GiB.
    pair = start_offload(int8_chain, meta, prefill, "int8-offload", 2 * shape.index_topk, kv_cache_bytes=24 * MIB)
    try:
        for case in equality_cases(CHUNK_TOKENS):
            before = PromptCounters.read(pair.decode.url)
            assert complete(pair.url, case.body()) == complete(single.url, case.body()), case.name
            counted = PromptCounters.read(pair.decode.url) - before
            fresh_blocks = case.prompt_blocks(BLOCK_TOKENS) - counted.cached_tokens // BLOCK_TOKENS
            token_bytes = shape.main_bytes_per_token + shape.indexer_bytes_per_token
            assert counted.pulled_bytes == fresh_blocks * BLOCK_TOKENS * token_bytes
    finally:
        pair.stop()
        for process in (prefill.process, single, meta.process):
            process.stop()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("decode_ranks", [1, 2], ids=lambda ranks: f"tp=2 to tp={ranks}")
def test_tensor_parallel_engines(
    decode_ranks: int, sparse_chain: Chain, sparse_meta: MetaProcess, sparse_single: ManagedProcess, start_offload: Any
) -> None:
    # Four workers that spin between steps share two cores here: patience is not what is tested.
    patient = replace(sparse_chain, kv_extra={"peer_timeout_s": 60.0})
    prefill = patient.start_prefill(sparse_meta, f"sparse-prefill-tp2-{decode_ranks}", tp_size=2)
    patient.launcher.wait_engines([prefill.process])
    name = f"offload-tp{decode_ranks}"
    pair = start_offload(
        patient, sparse_meta, prefill, name, 2 * SHAPE.index_topk, tp_size=decode_ranks, max_num_seqs=8
    )
    try:
        for case in equality_cases(CHUNK_TOKENS):
            before = PromptCounters.read(pair.decode.url)
            assert complete(pair.url, case.body()) == complete(sparse_single.url, case.body()), case.name
            counted = PromptCounters.read(pair.decode.url) - before
            fresh_blocks = case.prompt_blocks(BLOCK_TOKENS) - counted.cached_tokens // BLOCK_TOKENS
            # The ranks share main in the pool; each has an indexer of its own.
            token_bytes = SHAPE.main_bytes_per_token + decode_ranks * SHAPE.indexer_bytes_per_token
            assert counted.pulled_bytes == fresh_blocks * BLOCK_TOKENS * token_bytes, case.name
        questions = [body(prompt_of(20 + 67 * i, f"rank guest {i} "), 5 + 11 * i) for i in range(6)]
        with ThreadPoolExecutor(len(questions)) as pool:
            got = list(pool.map(lambda question: complete(pair.url, question), questions))
        assert got == [complete(sparse_single.url, question) for question in questions]
    finally:
        pair.stop()
        prefill.process.stop()
