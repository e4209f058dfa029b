"""The reference engine agrees with itself however a text is cut into steps, and it is really sparse."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from rd2h.demo.chain import Chain
from rd2h.demo.completions import Tokens, complete, post
from rd2h.demo.engine_spec import SERVED_NAME, EngineSpec
from rd2h.demo.process import ManagedProcess
from rd2h.reference.launch import ENGINE_ARGS, ENGINE_ENV
from rd2h.reference.weights import SparseShape, sparse_model_dir

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
TEXT = "It is a truth universally acknowledged, that a cache in possession of many blocks must be in want of a read. "
LENGTHS = (1, 16, 17, 31, 33, 255, 257, 700, 2000)
ANSWER_TOKENS = 24


def prompt_of(length: int, first: str = "") -> str:
    return (first + TEXT * (length // len(TEXT) + 1))[:length]


def greedy(prompt: str | list[int], max_tokens: int = ANSWER_TOKENS, **more: object) -> dict[str, Any]:
    return {
        "model": SERVED_NAME,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "return_token_ids": True,
        **more,
    }


def with_logprobs(url: str, prompt: str | list[int], max_tokens: int) -> tuple[Tokens, list[list[float]]]:
    choice = post(url, "/v1/completions", greedy(prompt, max_tokens, logprobs=5))["choices"][0]
    tops = [sorted(top.values(), reverse=True) for top in choice["logprobs"]["top_logprobs"]]
    return tuple(choice["token_ids"]), tops


@pytest.fixture(scope="module")
def whole(sparse_chain: Chain) -> Iterator[ManagedProcess]:
    """An engine that prefills every prompt in one step and reuses nothing."""
    spec = EngineSpec(
        "sparse-whole",
        sparse_chain.model_dir,
        max_batched_tokens=4096,
        extra_args=(*ENGINE_ARGS, "--no-enable-prefix-caching"),
        env=ENGINE_ENV,
    )
    engine = sparse_chain.launcher.start_engine(spec)
    sparse_chain.launcher.wait_engines([engine])
    yield engine
    engine.stop()


@pytest.mark.parametrize("length", LENGTHS)
def test_chunked_prefill_and_decode_give_the_logits_of_one_whole_prefill(
    length: int, sparse_single: ManagedProcess, whole: ManagedProcess
) -> None:
    prompt = prompt_of(length)
    tokens, tops = with_logprobs(sparse_single.url, prompt, ANSWER_TOKENS)
    for step in (0, 1, 7, ANSWER_TOKENS - 1):
        ids = [*prompt.encode(), *tokens[:step]]
        (again,), (top,) = with_logprobs(whole.url, ids, 1)
        assert again == tokens[step]
        assert top == pytest.approx(tops[step], abs=1e-4)


def test_prefix_hits_change_nothing(sparse_single: ManagedProcess, whole: ManagedProcess) -> None:
    for length in LENGTHS:
        body = greedy(prompt_of(length, "again "))
        first = complete(sparse_single.url, body)
        assert complete(sparse_single.url, body) == first == complete(whole.url, body)


def test_attention_is_sparse_beyond_topk_tokens_and_dense_below(
    sparse_chain: Chain, sparse_single: ManagedProcess
) -> None:
    shape = SparseShape()
    dense_dir = sparse_model_dir(replace(shape, index_topk=512))
    dense_weights = (dense_dir / "model.safetensors").read_bytes()
    assert dense_weights == (sparse_chain.model_dir / "model.safetensors").read_bytes()
    dense = sparse_chain.launcher.start_engine(
        EngineSpec("dense-twin", dense_dir, extra_args=ENGINE_ARGS, env=ENGINE_ENV)
    )
    sparse_chain.launcher.wait_engines([dense])
    try:
        within = greedy(prompt_of(shape.index_topk - 8), 8)
        assert complete(dense.url, within) == complete(sparse_single.url, within)
        for length in (40, 300, 450):
            beyond = greedy(prompt_of(length))
            assert complete(dense.url, beyond) != complete(sparse_single.url, beyond), length
    finally:
        dense.stop()


def test_batches_of_different_lengths_give_the_tokens_of_single_requests(sparse_single: ManagedProcess) -> None:
    prompts = [prompt_of(length, f"batch {length} ") for length in (9, 40, 300, 33, 120, 17, 700, 64)]
    together = complete(sparse_single.url, greedy(prompts))  # type: ignore[arg-type]
    alone = [complete(sparse_single.url, greedy(prompt))[0] for prompt in prompts]
    assert list(together) == alone
