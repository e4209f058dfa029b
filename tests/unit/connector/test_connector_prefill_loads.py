"""Beside a connector that loads, Prefill tells the end of a prompt only when all loads are known to have succeeded."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from connector_standins import P, RecordingControl, blocks, child_params, dispatch, prefill_half, scheduled

from rd2h.errors import RequestError
from rd2h.gates import Component, Slot, Writes
from rd2h.layout import CacheLayout, LayerLayout, TensorLayout
from rd2h.params import RemoteDecode, parse_remote_decodes
from rd2h.prefill.endpoint import EndpointChunk, EndpointKey
from rd2h.prefill.loads import LOAD_FAILED
from rd2h.prefill.worker import PrefillWorker
from rd2h.stats import TransferStats
from rd2h.steps import PrefillStep, Publication
from rd2h.timeline import Timeline
from rd2h.wire import Refusal

Wait = Callable[[], None]


class Publisher:
    """What would go out, in order: messages with what they wait for, and failures."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, tuple[bytes, ...], Wait | None]] = []
        self.failed: list[tuple[bytes, str]] = []

    def publish(
        self, layer_idx: int, chunks: Sequence[EndpointChunk], *, last_layer: bool, after: Wait | None = None
    ) -> None:
        self.messages += [(layer_idx, chunk.tokens, after) for chunk in chunks]

    def fail_children(self, key: EndpointKey, failures: Sequence[Refusal]) -> None:
        self.failed += [(failure.token, failure.reason) for failure in failures]

    def stopped(self, token: bytes) -> str | None:
        return None

    def wait_writable(self, slots: object, writes: object) -> None:
        pass


def make(*, beside_loaders: bool = True) -> tuple[PrefillWorker, Publisher]:
    layers = tuple(LayerLayout(f"l.{i}", (TensorLayout(0x1000 * (i + 1), 64, 8),), None, None) for i in range(2))
    slots = [(Slot(Component.MAIN, i),) for i in range(2)]
    publisher = Publisher()
    double: Any = publisher
    timeline = Timeline("P", None)
    worker = PrefillWorker(
        CacheLayout(layers), slots, 0, 1, double, TransferStats(), timeline, beside_loaders=beside_loaders
    )
    return worker, publisher


def child(**changes: Any) -> RemoteDecode:
    return parse_remote_decodes(dispatch(child_params(**changes))).children[0]


def run(worker: PrefillWorker, *publications: Publication) -> None:
    worker.begin(PrefillStep(Writes(frozenset(), frozenset()), publications))
    for name in ("l.0", "l.1"):
        worker.layer_written(name)
    worker.end()


def publication(of: RemoteDecode, prompt: Sequence[int], *, final: bool = True) -> Publication:
    return Publication(of, "external", 0, list(prompt), [], final, prompt_blocks=prompt)


def released(wait: Wait | None) -> bool:
    """Whether a message goes out now."""
    assert wait is not None
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(0.1)
    return not thread.is_alive()


A, B = child(token=1), child(token=2, remote_port=30000)


def test_only_the_end_of_a_prompt_is_held_back() -> None:
    worker, publisher = make()
    run(worker, publication(A, [1, 2]), publication(B, [3], final=False))
    first, *last = publisher.messages[1:]
    assert [after for _, _, after in (*publisher.messages[:2],)] == [None, None]
    assert first[0] == 0
    waits = {tokens: after for layer, tokens, after in last if layer == 1}
    assert waits[(B.token,)] is None
    assert not released(waits[(A.token,)])
    worker.loads_known(set())
    assert released(waits[(A.token,)])
    assert publisher.failed == []


def test_without_another_connector_nothing_is_held_back() -> None:
    worker, publisher = make(beside_loaders=False)
    run(worker, publication(A, [1, 2]))
    assert [after for _, _, after in publisher.messages] == [None, None]


def test_a_prompt_with_a_block_that_was_not_loaded_fails_alone() -> None:
    """Its blocks on Decode may begin after the lost one: everything computed from it is wrong all the same."""
    worker, publisher = make()
    sibling = child(token=3)
    lost = Publication(A, "external", 1, [2], [], True, prompt_blocks=[1, 2])
    run(worker, lost, publication(sibling, [5]), publication(B, [6]))
    worker.loads_known({1})
    assert publisher.failed == [(A.token, LOAD_FAILED)]
    # Decode knows before it is told the end, and refuses it for that child.
    assert all(released(after) for layer, _, after in publisher.messages if layer == 1)


def test_a_legacy_decode_is_not_told_the_end() -> None:
    worker, publisher = make()
    legacy = child_params(generation=None)
    del legacy["token"]
    run(worker, publication(parse_remote_decodes(dispatch(legacy)).children[0], [1]))
    worker.loads_known({1})
    after = publisher.messages[-1][2]
    assert after is not None
    with pytest.raises(RequestError, match="could not load some blocks"):
        after()
    assert publisher.failed == []


def test_a_last_layer_that_is_written_after_the_results_are_known() -> None:
    """A draft model runs after vLLM has asked for the results."""
    worker, publisher = make()
    worker.begin(PrefillStep(Writes(frozenset(), frozenset()), [publication(A, [1, 2])]))
    worker.layer_written("l.0")
    worker.loads_known({2})
    worker.layer_written("l.1")
    worker.end()
    assert publisher.failed == [(A.token, LOAD_FAILED)]
    assert released(publisher.messages[-1][2])


@pytest.mark.parametrize("end", ["next writes", "next step", "close"])
def test_results_that_never_come_do_not_keep_a_gate_shut(end: str) -> None:
    worker, publisher = make()
    run(worker, publication(A, [1]))
    after = publisher.messages[-1][2]
    assert after is not None
    if end == "next writes":
        worker.before_writes(PrefillStep(Writes(frozenset(), frozenset())))
    elif end == "next step":
        worker.begin(PrefillStep(Writes(frozenset(), frozenset())))
    else:
        worker.close()
    with pytest.raises(RequestError):
        after()


def test_the_wait_for_the_device_comes_first() -> None:
    worker, publisher = make()
    worker._record_event = lambda: _fail
    run(worker, publication(A, [1]))
    worker.loads_known(set())
    after = publisher.messages[-1][2]
    assert after is not None
    with pytest.raises(RuntimeError, match="the device"):
        after()


def _fail() -> None:
    raise RuntimeError("the device")


def test_the_scheduler_half_names_the_whole_prompt_where_others_load() -> None:
    for beside, expected in ((True, [[100, 101], [100, 101, 102]]), (False, [[], []])):
        half = prefill_half(RecordingControl(), beside_loaders=beside)
        half.track(P, dispatch(child_params()), 48)
        main, indexer = blocks(3)
        steps = [
            half.step([scheduled(P, 0, 32, (main[:2], indexer[:2]), fresh=True)], []),
            half.step([scheduled(P, 32, 16, (main[2:], indexer[2:]))], []),
        ]
        assert [list(step.publications[0].prompt_blocks) for step in steps] == expected
