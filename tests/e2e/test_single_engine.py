"""The ordinary engine that every comparison rests on: its tokens must depend on everything before them."""

from dataclasses import replace
from pathlib import Path

import pytest

from rd2h.demo.cases import equality_cases
from rd2h.demo.chain import Chain
from rd2h.demo.completions import complete
from rd2h.demo.counters import Counters
from rd2h.demo.engine_spec import SERVED_NAME, EngineSpec
from rd2h.demo.launcher import Launcher
from rd2h.demo.lifetime import LaunchError
from rd2h.demo.process import ManagedProcess

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
LONG = (
    "It is a truth universally acknowledged, that a cache in possession of many blocks must be in want of a read. " * 6
)


def greedy(prompt: str, max_tokens: int = 24) -> dict[str, object]:
    return {
        "model": SERVED_NAME,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "return_token_ids": True,
    }


def test_same_prompt_same_tokens_with_and_without_prefix_cache(single: ManagedProcess) -> None:
    before = Counters.read(single.url).total("vllm:prefix_cache_hits_total")
    first = complete(single.url, greedy(LONG))
    second = complete(single.url, greedy(LONG))
    assert first == second
    assert Counters.read(single.url).total("vllm:prefix_cache_hits_total") - before >= len(LONG) // 16 * 16 - 16


@pytest.mark.parametrize("position", [0, len(LONG) // 2, len(LONG) - 1])
def test_one_changed_character_changes_the_answer(single: ManagedProcess, position: int) -> None:
    changed = LONG[:position] + ("#" if LONG[position] != "#" else "!") + LONG[position + 1 :]
    assert complete(single.url, greedy(LONG)) != complete(single.url, greedy(changed))


def test_answer_is_not_a_short_cycle(single: ManagedProcess) -> None:
    (tokens,) = complete(single.url, greedy(LONG, max_tokens=64))
    assert len(set(tokens)) > 16
    assert all(tokens[i] != tokens[i + 2] or tokens[i + 1] != tokens[i + 3] for i in range(32, 60))


def test_chunked_prefill_gives_the_tokens_of_whole_prefill(
    single: ManagedProcess, chain: Chain, launcher: Launcher, tiny_model: Path
) -> None:
    whole = launcher.start_engine(EngineSpec("whole", tiny_model, max_batched_tokens=4096))
    launcher.wait_engines([whole])
    try:
        for case in equality_cases(chain.chunk_tokens):
            case = replace(case, prompts=tuple(f"~{prompt}" for prompt in case.prompts))
            assert complete(whole.url, case.body()) == complete(single.url, case.body()), case.name
    finally:
        whole.stop()


def test_busy_port_is_refused(single: ManagedProcess, launcher: Launcher, tiny_model: Path) -> None:
    port = int(single.url.rpartition(":")[2])
    with pytest.raises(LaunchError, match=f"port {port} .*in use"):
        launcher.start_engine(EngineSpec("twin", tiny_model), port)


def test_bad_argument_shows_the_log(launcher: Launcher, tiny_model: Path) -> None:
    engine = launcher.start_engine(EngineSpec("bad", tiny_model, extra_args=("--no-such-flag",)))
    with pytest.raises(LaunchError, match=r"bad ended with code 2(.|\n)*no-such-flag"):
        engine.wait_ready(60)
