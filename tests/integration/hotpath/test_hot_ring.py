"""Three physical buffers shared by 61 layers: no byte is read from a buffer that has a new owner already."""

from collections.abc import Callable

import pytest
from harness.cache import CacheSpec
from harness.controlled import ReadControl
from harness.pair import Decode, Prefill, Prompts, parts
from harness.waiting import wait_for
from harness.worker import Worker

SOURCE = CacheSpec(layers=61, blocks=48, main_bytes=(64, 16), indexer_bytes=16, buffers=3)
DESTINATION = CacheSpec(layers=61, blocks=48, main_bytes=(64, 16), indexer_bytes=16)
REQUESTS = 4
BLOCKS = 6


@pytest.mark.parametrize(
    "chunks", [pytest.param(4, id="short"), pytest.param(84, id="ten thousand layers", marks=pytest.mark.slow)]
)
@pytest.mark.timeout(900)
def test_ring_of_buffers(take_worker: Callable[[], Worker], chunks: int) -> None:
    prefill = Prefill.start(take_worker(), SOURCE)
    decodes = [Decode.start(take_worker(), DESTINATION, trusted=[prefill.generation]) for _ in range(2)]
    for decode in decodes:
        decode.worker.call("control", ReadControl(jitter_before_s=0.004, jitter_after_s=0.002))
        decode.worker.call("repeat_answers", 3)
    layers_read = 0
    prompts = Prompts(SOURCE)
    for chunk in range(chunks):
        children = [(d, prompts.child(BLOCKS)) for d in decodes for _ in range(REQUESTS // 2)]
        for decode, child in children:
            decode.add(child)
            decode.expect(child)
        # The forward pass waits at the gates of what it overwrites, layer by layer.
        prefill.publish([part for decode, child in children for part in parts(child, decode.address)])
        for decode, child in children:
            decode.wait_reported(child, "done", 60.0)
        for decode in decodes:
            decode.check()
            stats = decode.worker.call("stats")
            layers_read += int(stats["layers_read"])
            decode.worker.call("reset")
            decode.expected.main.clear()
            decode.expected.indexer.clear()
            decode.reports.clear()
        for _, child in children:
            prompts.p_main.give(child.p_main)
            prompts.p_indexer.give(child.p_indexer)
            prompts.d_main.give(child.d_main)
            prompts.d_indexer.give(child.d_indexer)
        assert prefill.worker.call("failures") == {}, f"chunk {chunk}"
    assert layers_read == chunks * 2 * SOURCE.layers
    prefill.wait_settled()
    wait_for("duplicates arrived", lambda: prefill.worker.call("stats").get("acks_ignored", 0) > 0)
    stats = prefill.worker.call("stats")
    for decode in decodes:
        decode.check_baseline()
    assert prefill.worker.call("alive"), stats
