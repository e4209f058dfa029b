"""A layer is told only when the device has written it."""

import queue
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from rd2h.gates import ALL_BLOCKS, ChunkBlocks, Component, Slot
from rd2h.prefill.device import DeviceOrder, event_recorder
from rd2h.prefill.endpoint import EndpointChunk, EndpointKey
from rd2h.prefill.publisher import Publisher, PublisherOptions, SourceMemory
from rd2h.stats import TransferStats
from rd2h.wire import PeerInfo, Refusal

TOKEN, OTHER = secrets.token_bytes(16), secrets.token_bytes(16)


class Event:
    """A device event that is reached when the test says so."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.error: BaseException | None = None

    def wait(self) -> None:
        assert self.reached.wait(20)
        if self.error is not None:
            raise self.error


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.002)


@pytest.fixture
def failures() -> list[Refusal]:
    return []


@pytest.fixture
def publisher(failures: list[Refusal]) -> Iterator[Publisher]:
    slots = [(Slot(Component.MAIN, 0),), (Slot(Component.MAIN, 1),)]
    memory = SourceMemory("session", b"\x80", ["layer 0", "layer 1"], slots, PeerInfo(1, 2, b"", 1, 0))
    made = Publisher(memory, PublisherOptions(connect_timeout_s=30), TransferStats(), failures.extend)
    yield made
    made.close()


def chunk(token: bytes = TOKEN) -> EndpointChunk:
    blocks = ChunkBlocks(frozenset({1, 2}), frozenset())
    return EndpointChunk(EndpointKey("127.0.0.1", 9, 3), b"\x90", blocks, (token,), (), (), 0, 1)


def test_gates_close_before_the_device_is_done_and_nothing_is_queued_until_then(publisher: Publisher) -> None:
    event = Event()
    publisher.publish(0, [chunk()], last_layer=False, after=event.wait)
    assert publisher.outstanding() == 1
    (endpoint,) = publisher._book.endpoints.values()
    assert not endpoint.outbox
    event.reached.set()
    until(lambda: len(endpoint.outbox) == 1)
    assert publisher._device.alive


def test_layers_go_out_in_order(publisher: Publisher) -> None:
    first, second = Event(), Event()
    publisher.publish(0, [chunk()], last_layer=False, after=first.wait)
    publisher.publish(1, [chunk()], last_layer=True, after=second.wait)
    second.reached.set()
    (endpoint,) = publisher._book.endpoints.values()
    first.reached.set()
    until(lambda: len(endpoint.outbox) == 2)
    assert [message.layer_idx for message in endpoint.outbox] == [0, 1]


def test_a_failed_device_opens_the_gate_and_fails_the_children(publisher: Publisher, failures: list[Refusal]) -> None:
    event = Event()
    event.error = RuntimeError("out of order")
    publisher.publish(0, [chunk()], last_layer=False, after=event.wait)
    event.reached.set()
    publisher.wait_writable(None, ALL_BLOCKS)
    until(lambda: bool(failures))
    assert failures == [Refusal(TOKEN, "the device failed before a layer was written: RuntimeError: out of order")]
    (endpoint,) = publisher._book.endpoints.values()
    assert not endpoint.outbox


@pytest.mark.parametrize("error", [ValueError("no such device"), OSError(5, "input/output error"), KeyError("npu")])
def test_any_error_of_the_wait_costs_its_layer_alone(
    error: Exception, publisher: Publisher, failures: list[Refusal]
) -> None:
    """Whatever a driver raises: the thread goes on, or the gates of all later layers would stay shut for ever."""
    first, second = Event(), Event()
    first.error = error
    publisher.publish(0, [chunk()], last_layer=False, after=first.wait)
    publisher.publish(1, [chunk(OTHER)], last_layer=False, after=second.wait)
    first.reached.set()
    until(lambda: bool(failures))
    assert [failure.token for failure in failures] == [TOKEN]
    assert "the device failed" in failures[0].reason
    assert type(error).__name__ in failures[0].reason
    second.reached.set()
    (endpoint,) = publisher._book.endpoints.values()
    until(lambda: len(endpoint.outbox) == 1)
    assert publisher._device.alive
    assert publisher.outstanding() == 1


def test_an_error_while_a_layer_is_told_costs_its_children_alone(
    publisher: Publisher, failures: list[Refusal], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message that was half sent is of no use, and nobody would ever open its gate."""
    tell = publisher._book.enqueue

    def broken(endpoint: Any, message: Any, error: str = "") -> None:
        if TOKEN in message.chunk.tokens:
            raise ValueError("a defect")
        tell(endpoint, message, error)

    monkeypatch.setattr(publisher._book, "enqueue", broken)
    event = Event()
    publisher.publish(0, [chunk(), chunk(OTHER)], last_layer=False, after=event.wait)
    event.reached.set()
    until(lambda: bool(failures))
    assert [failure.token for failure in failures] == [TOKEN]
    assert "a defect" in failures[0].reason
    (endpoint,) = publisher._book.endpoints.values()
    until(lambda: len(endpoint.outbox) == 1)
    assert publisher.outstanding() == 1
    assert publisher._device.alive


def test_an_action_that_raises_does_not_end_the_thread() -> None:
    order, done = DeviceOrder(), threading.Event()

    def raising(error: str) -> None:
        raise ValueError(error or "a defect")

    order.then(lambda: None, raising)
    order.then(lambda: None, lambda error: done.set())
    assert done.wait(20)
    assert order.alive
    order.close(5)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nothing_waits_for_a_thread_that_has_ended() -> None:
    """Only what no handler may stop ends it; then layers fail at once instead of waiting in its queue."""
    order, told, held = DeviceOrder(), queue.SimpleQueue[str](), Event()
    held.error = SystemExit()
    order.then(held.wait, told.put)
    order.then(lambda: None, told.put)
    held.reached.set()
    for _ in range(2):
        assert "has ended" in told.get(timeout=20)
    until(lambda: not order.alive)
    order.then(lambda: None, told.put)
    assert "has ended" in told.get(timeout=1)
    order.close(1)


def test_an_endpoint_lost_meanwhile_is_told_nothing(publisher: Publisher, failures: list[Refusal]) -> None:
    event = Event()
    publisher.publish(0, [chunk()], last_layer=False, after=event.wait)
    (endpoint,) = publisher._book.endpoints.values()
    with publisher._changed:
        endpoint.lost("it went away")
    event.reached.set()
    publisher.wait_writable(None, ALL_BLOCKS)
    until(lambda: bool(failures))
    assert failures == [Refusal(TOKEN, "it went away")]


def test_order_needs_no_thread_before_its_first_event() -> None:
    order = DeviceOrder()
    assert order.alive
    order.close(1)


def test_recorder_of_a_cpu_is_none_and_of_an_accelerator_waits_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class FakeEvent:
        def record(self) -> None:
            calls.append("record")

        def synchronize(self) -> None:
            calls.append("synchronize")

    device = SimpleNamespace(type="npu", index=3)
    npu = SimpleNamespace(Event=FakeEvent, set_device=lambda where: calls.append(f"device {where.index}"))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(npu=npu))
    assert event_recorder(SimpleNamespace(type="cpu")) is None
    record = event_recorder(device)
    assert record is not None
    wait = record()
    assert calls == ["record"]
    wait()
    assert calls == ["record", "device 3", "synchronize"]
