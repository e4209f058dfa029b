"""Both of vLLM's ways to schedule, and caches so small that requests wait, are preempted and resume."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_state import wait_idle

from rd2h.demo.cases import Case, equality_cases
from rd2h.demo.chain import Chain, ConnectedEngine, MetaProcess
from rd2h.demo.completions import complete
from rd2h.demo.engine_spec import MIB
from rd2h.demo.launcher import Launcher
from rd2h.demo.process import ManagedProcess

pytestmark = [pytest.mark.e2e, pytest.mark.pd, pytest.mark.timeout(300)]
CHUNK_TOKENS = 256


@pytest.fixture(params=["--async-scheduling", "--no-async-scheduling"])
def scheduled_pair(
    request: pytest.FixtureRequest, launcher: Launcher, chain: Chain, meta: MetaProcess
) -> Iterator[tuple[ManagedProcess, ConnectedEngine, ConnectedEngine]]:
    """A pair with caches for about 1,100 tokens, far less than the requests below need at once."""
    flag = str(request.param)
    small = Chain(launcher, chain.model_dir, CHUNK_TOKENS, engine_args=(flag,))
    changes = {"kv_cache_bytes": 13 * MIB, "max_model_len": 1024}
    name = flag.strip("-")
    prefill = small.start_prefill(meta, f"prefill-{name}")
    decode = small.start_decode(meta, f"decode-{name}", changes=changes)
    launcher.wait_engines([prefill.process, decode.process])
    proxy = small.start_proxy(meta, prefill.process, decode.process, f"proxy-{name}")
    yield proxy, prefill, decode
    for process in (proxy, decode.process, prefill.process):
        process.stop()


def test_crowded_decode_gives_the_same_tokens(
    scheduled_pair: tuple[ManagedProcess, ConnectedEngine, ConnectedEngine], single: ManagedProcess
) -> None:
    proxy, prefill, decode = scheduled_pair
    # Greedy only: without asynchronous scheduling vLLM's CPU runner cannot seed a request whose prefill is chunked.
    cases = [case for case in equality_cases(CHUNK_TOKENS) if max(map(len, case.prompts)) < 900 and case.choices == 1]
    cases += [Case(f"crowd {n}", (f"Guest number {n} tells a long story. " * 6,), max_tokens=120) for n in range(8)]
    expected = [complete(single.url, case.body()) for case in cases]
    with ThreadPoolExecutor(len(cases)) as pool:
        answers = list(pool.map(lambda case: complete(proxy.url, case.body()), cases))
    for case, answer, wanted in zip(cases, answers, expected, strict=True):
        assert answer == wanted, case.name
    wait_idle(prefill, decode)
