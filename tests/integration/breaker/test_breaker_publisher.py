"""Attacks on Prefill's publisher: swallowed edges, lost wake-ups, exhausted sockets."""

import errno
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import zmq
from harness.scripted import ScriptedDecode
from harness.waiting import wait_for

from rd2h.gates import ALL_BLOCKS, ChunkBlocks, Component, Slot
from rd2h.prefill import book as book_module
from rd2h.prefill.endpoint import EndpointChunk, EndpointKey
from rd2h.prefill.link import Link
from rd2h.prefill.publisher import Publisher, PublisherOptions, SourceMemory
from rd2h.stats import TransferStats
from rd2h.wire import PeerInfo, Pong, Refusal, decode_from_prefill, encode_mf_ack, encode_ping, encode_pong

LAYERS = ("layer 0", "layer 1")
Make = Callable[..., Publisher]


@pytest.fixture
def failures() -> list[Refusal]:
    return []


@pytest.fixture
def make(failures: list[Refusal]) -> Iterator[Make]:
    made: list[Publisher] = []

    def build(options: PublisherOptions | None = None) -> Publisher:
        slots = [(Slot(Component.MAIN, index),) for index in range(len(LAYERS))]
        memory = SourceMemory("session", b"\x80", LAYERS, slots, PeerInfo(1, 2, b"", 1, 0))
        publisher = Publisher(memory, options or PublisherOptions(), TransferStats(), failures.extend)
        publisher.start()
        made.append(publisher)
        return publisher

    yield build
    for publisher in made:
        publisher.close()


def chunk(port: int, generation: int | None, token: bytes = b"") -> EndpointChunk:
    tokens = (token,) if token else ()
    blocks = ChunkBlocks(frozenset({1, 2}), frozenset())
    return EndpointChunk(EndpointKey("127.0.0.1", port, generation), b"\x90", blocks, tokens, (), (), 0, 1)


def test_a_message_that_arrives_while_the_publisher_sends_is_not_left_in_the_socket(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sending swallows the edge of a message that came since the socket was drained; nothing else may ever come."""
    with ScriptedDecode() as decode:
        port, generation = decode.address.base_port, decode.address.generation
        assert generation is not None

        # The scripted socket belongs to this thread: the publisher's only says when, and waits for the ping to be out.
        answering, pinged = threading.Event(), threading.Event()

        def slow_pong(own: int, clock_ns: int) -> bytes:
            if clock_ns == 7:
                answering.set()
                assert pinged.wait(5)
                time.sleep(0.2)
            return encode_pong(own, clock_ns)

        monkeypatch.setattr(book_module, "encode_pong", slow_pong)
        publisher = make()
        publisher.publish(0, [chunk(port, generation)], last_layer=False)
        decode.receive()
        decode.send(encode_mf_ack(generation, 7))
        assert answering.wait(5)
        decode.send(encode_ping(generation, 8))
        pinged.set()
        clocks: list[int] = []
        deadline = time.monotonic() + 5
        while 8 not in clocks and time.monotonic() < deadline:
            if decode._socket.poll(100):
                message = decode_from_prefill(decode._socket.recv_multipart()[1])
                if isinstance(message, Pong):
                    clocks.append(message.clock_ns)
        assert clocks == [7, 8]


def test_more_decodes_than_one_zeromq_context_opens_sockets_for_by_default(make: Make, failures: list[Refusal]) -> None:
    """ZeroMQ allows 1023 sockets a context; a link takes three. The 342nd Decode must not end the publisher."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        port = listener.getsockname()[1]
        publisher = make(PublisherOptions(connect_timeout_s=3.0))
        for generation in range(1, 401):
            publisher.publish(0, [chunk(port, generation, secrets.token_bytes(16))], last_layer=False)
        wait_for("every gate opens", lambda: not publisher.outstanding(), 40)
    # Failures are handed out after the lock is given back, so a moment after the gates open.
    wait_for("every child fails", lambda: len(failures) == 400, 10)
    assert publisher.alive


def test_an_endpoint_that_gets_no_socket_fails_alone(
    make: Make, failures: list[Refusal], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Descriptors can run out in a busy process: that costs the requests of this Decode, not the publisher."""
    publisher = make()

    def exhausted(*_: object) -> Link:
        raise zmq.ZMQError(errno.EMFILE)

    token = secrets.token_bytes(16)
    with ScriptedDecode() as decode:
        with monkeypatch.context() as patch:
            patch.setattr(book_module, "Link", exhausted)
            publisher.publish(0, [chunk(9, 5, token)], last_layer=False)
            wait_for("the gate opens", lambda: not publisher.outstanding(), 10)
        wait_for("the child fails", lambda: [failure.token for failure in failures] == [token], 10)
        assert publisher.alive
        publisher.publish(0, [chunk(decode.address.base_port, decode.address.generation)], last_layer=False)
        decode.handshake()
        decode.done(decode.ready())
        wait_for("the gate opens", lambda: not publisher.outstanding(), 10)


def test_a_loss_that_the_forward_thread_sees_is_timed_by_the_sleeping_publisher(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A legacy Decode has hardly a time limit while it stands, so the publisher sleeps for long when it is lost."""
    publisher = make(PublisherOptions(peer_timeout_s=2.0, connect_timeout_s=0.5, handshake_timeout_s=0.5))
    with ScriptedDecode(legacy=True) as decode:
        port = decode.address.base_port
        publisher.publish(0, [chunk(port, None)], last_layer=False)
        decode.handshake()
        decode.ready()
        wait_for("no near time limit is left", lambda: publisher._book.check_at_s > time.monotonic() + 60)
        with monkeypatch.context() as patch:
            patch.setattr(Link, "send", lambda *_: False)
            publisher.publish(1, [chunk(port, None)], last_layer=True)
        assert publisher.outstanding() == 1
        waiter = threading.Thread(target=publisher.wait_writable, args=(None, ALL_BLOCKS), daemon=True)
        waiter.start()
        waiter.join(8)
        assert not waiter.is_alive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_publisher_does_not_free_what_a_decode_may_still_read(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode's read lease outlives the publisher's thread: its last echo may be quite fresh."""
    publisher = make(PublisherOptions(peer_timeout_s=2.0))

    def broken(_: Sequence[int]) -> None:
        raise RuntimeError("a defect")

    with ScriptedDecode() as decode:
        generation = decode.address.generation
        assert generation is not None
        publisher.publish(0, [chunk(decode.address.base_port, generation)], last_layer=False)
        decode.handshake()
        decode.ready()
        monkeypatch.setattr(publisher._book, "step", broken)
        decode.send(encode_ping(generation, 1))
        begin = time.monotonic()
        wait_for("the thread is dead", lambda: not publisher.alive)
        publisher.wait_writable(None, ALL_BLOCKS)
        assert 1.0 <= time.monotonic() - begin < 10
        publisher.wait_writable(None, ALL_BLOCKS)


def test_close_releases_a_waiting_writer_at_once_and_may_come_twice(make: Make) -> None:
    publisher = make()
    with ScriptedDecode() as decode:
        publisher.publish(0, [chunk(decode.address.base_port, decode.address.generation)], last_layer=False)
        decode.handshake()
        decode.ready()
        waiter = threading.Thread(target=publisher.wait_writable, args=(None, ALL_BLOCKS), daemon=True)
        waiter.start()
        publisher.close()
        waiter.join(5)
        assert not waiter.is_alive()
        publisher.close()
