"""All endpoints of a Prefill rank, their gates and their links. Everything here runs under the publisher's lock.

What is decided about an endpoint is decided here: when its messages go out, what an answer opens, when it is lost, and
when its gates may open although it never answered. Nothing waits.
"""

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import zmq

from rd2h.cpus import bind_io_threads
from rd2h.errors import QueueFullError, StateError, WireError
from rd2h.gates import GateEntry, SlotGates
from rd2h.prefill.endpoint import MAX_OUTBOX, Endpoint, EndpointChunk, EndpointKey, EndpointState, LayerMessage
from rd2h.prefill.link import Link, LinkEvent
from rd2h.prefill.options import PublisherOptions, SourceMemory
from rd2h.prefill.watch import LinkWatch
from rd2h.stats import TransferStats
from rd2h.wire import (
    LegacyAck,
    MfAck,
    Ping,
    ReadDone,
    ReadFailed,
    Refusal,
    StopSending,
    decode_from_decode,
    encode_mf_meta,
    encode_pong,
    encode_prefill_failed,
    encode_ready,
)

logger = logging.getLogger(__name__)

MAX_ENDPOINTS = 4096
MAX_STOPPED = 65536
Clock = Callable[[], float]
_ANSWERS = (ReadDone, ReadFailed)


class PublishBook:
    """See the module. Children that get no more KV gather in ``failed``, each once."""

    def __init__(
        self,
        memory: SourceMemory,
        options: PublisherOptions,
        stats: TransferStats,
        clock: Clock = time.monotonic,
    ) -> None:
        self._memory, self._options, self._stats, self._clock = memory, options, stats, clock
        self.gates = SlotGates()
        self.watch = LinkWatch()
        self.failed: list[Refusal] = []
        self.stopped: OrderedDict[bytes, str] = OrderedDict()
        self.closed = False
        self.check_at_s = math.inf
        """When a time limit has to be looked at."""
        self.endpoints: dict[EndpointKey, Endpoint] = {}
        self._fading: list[Endpoint] = []
        """Lost endpoints whose Decode may still use what it was told."""
        self._fresh: list[Endpoint] = []
        """Endpoints without a socket yet."""
        self._links: dict[int, Link] = {}
        self._next_seq = 0
        self._next_endpoint = 0
        self._context: zmq.Context[Any] = zmq.Context(io_threads=1)
        # A link takes three sockets, and lost ones linger; ZeroMQ's own limit would allow 341 links.
        self._context.set(zmq.MAX_SOCKETS, 4 * MAX_ENDPOINTS)
        bind_io_threads(self._context, options.cpus)

    # --- what the forward thread asks for ---

    def prepare(self, layer_idx: int, chunk: EndpointChunk, last_layer: bool) -> tuple[Endpoint, LayerMessage] | None:
        """Close the gates of one layer of a chunk; None when it cannot be published (its children fail)."""
        try:
            endpoint = self.endpoint(chunk.key, self._clock())
            if len(endpoint.outbox) + len(endpoint.unacknowledged) >= MAX_OUTBOX:
                raise QueueFullError(f"{MAX_OUTBOX} ready messages are outstanding for {chunk.key}")
        except (QueueFullError, StateError) as error:
            self.fail(Refusal(token, str(error)) for token in chunk.tokens)
            return None
        self._next_seq += 1
        message = LayerMessage(self._next_seq, layer_idx, last_layer, chunk)
        slots = self._memory.slots[layer_idx]
        self.gates.close(GateEntry(endpoint.number, message.seq, layer_idx, slots, chunk.blocks))
        return endpoint, message

    @property
    def contacting(self) -> bool:
        """Whether children may fail that nobody else can tell of: their Decode has not answered yet (one that has knows
        what becomes of its children), or their failure is noted and not handed out."""
        if self.failed:
            return True
        return len(self.gates) > 0 and any(not endpoint.answered for endpoint in self.endpoints.values())

    def enqueue(self, endpoint: Endpoint, message: LayerMessage, error: str = "") -> None:
        """The layer is written: send its message now or when the endpoint is ready. With ``error`` it never will be."""
        if endpoint.usable and not error:
            endpoint.outbox.append(message)
            self._flush_from_outside(endpoint)
            return
        # Nobody was told, so nobody reads.
        self.gates.give_up_where(endpoint.number, [message.seq])
        self.fail(Refusal(token, error or endpoint.reason) for token in message.chunk.tokens)

    def break_off(self, endpoint: Endpoint, message: LayerMessage, reason: str) -> None:
        """Telling a message failed half-way: its children fail, and so does a connection that may have sent it."""
        link = self._links.get(endpoint.number)
        if link is not None:
            self._lose(link, reason)
        else:
            if message in endpoint.outbox:
                endpoint.outbox.remove(message)
            self.gates.give_up_where(endpoint.number, [message.seq])
        self.fail(Refusal(token, reason) for token in message.chunk.tokens)

    def tell_failure(self, key: EndpointKey, failures: Sequence[Refusal]) -> None:
        """Tell a Decode that Prefill will not deliver these children, and publish them no more."""
        for failure in failures:
            self.stop(failure.token, failure.reason)
        if key.generation is None:
            return
        try:
            endpoint = self.endpoint(key, self._clock())
        except (QueueFullError, StateError):
            return
        endpoint.notices.append(encode_prefill_failed(key.generation, failures))
        self._flush_from_outside(endpoint)

    def stop(self, token: bytes, reason: str) -> bool:
        """Publish a child no more; False when that was so already."""
        if token in self.stopped:
            return False
        self.stopped[token] = reason
        while len(self.stopped) > MAX_STOPPED:
            self.stopped.popitem(last=False)
        return True

    def fail(self, failures: Iterable[Refusal]) -> None:
        """Note children that get no more KV, each once."""
        self.failed += [failure for failure in failures if self.stop(failure.token, failure.reason)]

    # --- endpoints and sending ---

    def endpoint(self, key: EndpointKey, now_s: float) -> Endpoint:
        """The usable endpoint at an address, made if need be. Raises QueueFullError, StateError."""
        if self.closed:
            # A dead publisher costs these requests, never the engine.
            raise StateError("the publisher is not running")
        endpoint = self.endpoints.get(key)
        if endpoint is not None and endpoint.usable:
            return endpoint
        if len(self.endpoints) >= MAX_ENDPOINTS:
            raise QueueFullError(f"{MAX_ENDPOINTS} Decode endpoints are already in use")
        self._next_endpoint += 1
        endpoint = Endpoint(self._next_endpoint, key, now_s + self._options.connect_timeout_s)
        self.endpoints[key] = endpoint
        self._fresh.append(endpoint)
        self.watch.wake()
        return endpoint

    def _flush_from_outside(self, endpoint: Endpoint) -> None:
        """Flush on a thread that does not receive: what it leaves in the socket must reach the one that does."""
        link = self._links.get(endpoint.number)
        if link is not None:
            self._flush(link)
            self._look_again(link)

    def _look_again(self, link: Link) -> None:
        """Sending may have swallowed the edge of a message that came meanwhile; later ones make none of their own."""
        if link.receivable:
            self.watch.leave_unattended(link)

    def _flush(self, link: Link) -> None:
        """Send what may go out now."""
        endpoint = link.endpoint
        if endpoint.state is not EndpointState.READY:
            return
        while endpoint.notices:
            if not link.send(endpoint.notices[0]):
                self._lose(link, "its send queue is full")
                return
            endpoint.notices.popleft()
        now = self._clock()
        count = 0
        while (message := endpoint.next_message()) is not None:
            if not link.send(self._encode(endpoint, message)):
                endpoint.outbox.appendleft(message)
                self._lose(link, "its send queue is full")
                return
            endpoint.sent(message, now)
            count += 1
        if not count:
            return
        self._stats.add(layers_published=count)
        due_s = now + self._options.legacy_ack_timeout_s
        if endpoint.legacy and due_s < self.check_at_s:
            self._check_by(due_s)
            self.watch.wake()  # the publisher's thread may be waiting for longer

    def _encode(self, endpoint: Endpoint, message: LayerMessage) -> bytes:
        chunk = message.chunk
        done_ids, done_tokens = (chunk.done_ids, chunk.done_tokens) if message.last_layer else ((), ())
        generation = endpoint.key.generation
        return encode_ready(
            message.layer_idx,
            self._memory.layer_names[message.layer_idx],
            chunk.requests_raw,
            done_ids,
            chunk.member,
            chunk.ratio,
            None if generation is None else (generation, message.seq, done_tokens),
        )

    # --- receiving ---

    def step(self, fds: Sequence[int]) -> None:
        """Handle what the watch reported, then the time limits."""
        touched, woken = self.watch.touched(fds)
        if woken:
            self._connect_fresh()
        for link in touched:
            # Handling one link may close another (a new generation replaces an old one).
            if self._links.get(link.endpoint.number) is link:
                self._receive(link, monitored=link.fds[1] in fds)
                self._look_again(link)
        if self._clock() >= self.check_at_s:
            self.check_times()

    def close(self) -> None:
        """Close all links; nothing is published any more."""
        self.closed = True
        for link in self._links.values():
            self.watch.remove(link)
            link.close()
        self._links.clear()

    def terminate(self) -> None:
        """Release what is left, without the lock: sockets may take ``LINGER_MS`` to send their last messages."""
        self._context.term()
        self.watch.close()

    def _connect_fresh(self) -> None:
        fresh, self._fresh = self._fresh, []
        for endpoint in fresh:
            try:
                link = Link(endpoint, self._context, self._options.connect_timeout_s)
            except zmq.ZMQError as error:  # no descriptor or no socket is left
                self._abandon(endpoint, f"no socket for it: {error}")
                continue
            self._links[endpoint.number] = link
            self.watch.add(link)
            self._check_by(endpoint.deadline_s)
            if link.unusable:
                self._lose(link, "its address cannot be used")
            else:
                self._receive(link, monitored=True)  # a ZeroMQ descriptor tells nothing before a first look
                self._look_again(link)

    def _receive(self, link: Link, *, monitored: bool) -> None:
        endpoint = link.endpoint
        event = link.take_event() if monitored else None
        payloads = link.receive()
        if event is LinkEvent.CONNECTED and endpoint.state is EndpointState.CONNECTING:
            endpoint.connected(self._clock() + self._options.handshake_timeout_s)
            self._check_by(endpoint.deadline_s)
            peer = None if endpoint.legacy else self._memory.peer
            if not link.send(encode_mf_meta(self._memory.session, self._memory.encoded_layers, peer)):
                event = LinkEvent.LOST
        for payload in payloads:
            try:
                self._handle(link, payload)
            except WireError as error:
                self._stats.add(frames_malformed=1)
                if link.complain_once():
                    logger.warning("rd2h: malformed reply from Decode %s: %s", endpoint.key, error)
            if not endpoint.usable:
                return
        if event is LinkEvent.LOST:
            self._lose(link, "the connection was lost")

    def _handle(self, link: Link, payload: bytes) -> None:
        message = decode_from_decode(payload)
        endpoint = link.endpoint
        now = self._clock()
        if isinstance(message, _ANSWERS):
            endpoint.heard(now)
            self._acknowledge(endpoint, message, now)
            if isinstance(message, ReadDone) and not endpoint.legacy:  # a legacy Decode was not asked for these
                for layer_idx, seq in message.also:
                    self._acknowledge(endpoint, ReadDone(layer_idx, seq, message.refused), now)
            if endpoint.legacy:
                self._flush(link)
        elif isinstance(message, Ping):
            endpoint.heard(now)
            link.send(encode_pong(self._memory.peer.generation, message.clock_ns))
        elif isinstance(message, StopSending):
            if message.generation == self._memory.peer.generation:
                endpoint.heard(now)
                for token in message.tokens:
                    self.stop(token, "Decode no longer wants it")
        elif isinstance(message, MfAck):
            self._handshaken(link, message, now)
        elif isinstance(message, LegacyAck) and endpoint.legacy:
            endpoint.acknowledged(now)
            self._flush(link)

    def _handshaken(self, link: Link, ack: MfAck, now_s: float) -> None:
        endpoint = link.endpoint
        if ack.generation != endpoint.key.generation:
            self._lose(link, f"generation {ack.generation} answers where {endpoint.key.generation} was advertised")
            return
        if ack.error:
            link.send(encode_prefill_failed(ack.generation, endpoint.open_failures(ack.error)))
            self._bury(endpoint, ack.error)  # it says itself that it reads nothing from here
            return
        # The echo comes before the first ready message, so Decode's read lease runs when it reads.
        link.send(encode_pong(self._memory.peer.generation, ack.clock_ns))
        endpoint.acknowledged(now_s)
        self._check_by(now_s + self._options.peer_timeout_s)
        for other in [*self.endpoints.values(), *self._fading]:
            if other.key[:2] == endpoint.key[:2] and other.key.generation != ack.generation:
                # Only one process can own the port: the older generation is gone for good.
                self._bury(other, "a new generation answers on its address")
        self._flush(link)

    def _acknowledge(self, endpoint: Endpoint, reply: ReadDone | ReadFailed, now_s: float) -> None:
        found = endpoint.match(reply.layer_idx, reply.seq)
        if found is None:
            self._stats.add(acks_ignored=1)
            return
        message, sent_s = found
        self.gates.acknowledge(endpoint.number, message.seq, message.layer_idx)
        self._stats.add(acks=1, ack_seconds=now_s - sent_s)
        if isinstance(reply, ReadFailed):
            self.fail(Refusal(token, reply.error) for token in message.chunk.tokens)
        elif reply.refused:
            mine = set(message.chunk.tokens)
            self.fail(refusal for refusal in reply.refused if refusal.token in mine)

    # --- time limits and loss ---

    def _check_by(self, deadline_s: float) -> None:
        """Time limits must be looked at then; deadlines that move later are found again at that time."""
        self.check_at_s = min(self.check_at_s, deadline_s)

    def check_times(self) -> None:
        """Give up what is past its time, and note when to look again."""
        now = self._clock()
        for link in list(self._links.values()):
            endpoint = link.endpoint
            due_s = endpoint.give_up_at_s(self._options)
            if now >= due_s and endpoint.state is EndpointState.READY:
                silent = f"nothing heard for {self._options.peer_timeout_s:g} s"
                unanswered = f"a message not answered for {self._options.legacy_ack_timeout_s:g} s"
                self._lose(link, unanswered if endpoint.legacy else silent)
            elif now >= due_s:
                self._lose(link, f"no answer while {endpoint.state.name.lower()}")
        for endpoint in list(self._fading):
            if now >= endpoint.give_up_at_s(self._options):
                self._bury(endpoint, endpoint.reason)
        known = [*(link.endpoint for link in self._links.values()), *self._fading]
        self.check_at_s = min((e.give_up_at_s(self._options) for e in known), default=math.inf)

    def _lose(self, link: Link, reason: str) -> None:
        """The connection is over: its children fail; what was sent stays gated while Decode may still use it."""
        endpoint = link.endpoint
        if not endpoint.usable:
            return
        logger.warning("rd2h: lost Decode %s:%s: %s", endpoint.key.host, endpoint.key.port, reason)
        failures = endpoint.open_failures(f"Decode {endpoint.key.host}:{endpoint.key.port}: {reason}")
        handshaken = endpoint.state is EndpointState.READY
        endpoint.lost(reason)
        if self.endpoints.get(endpoint.key) is endpoint:
            del self.endpoints[endpoint.key]
        self._stats.add(endpoints_lost=1)
        self.watch.remove(link)
        link.close()
        del self._links[endpoint.number]
        self.gates.give_up_where(endpoint.number, [message.seq for message in endpoint.outbox])
        endpoint.outbox.clear()
        endpoint.notices.clear()
        due_s = endpoint.give_up_at_s(self._options)
        if handshaken and self._clock() < due_s:
            self._fading.append(endpoint)
            self._check_by(due_s)
            self.watch.wake()  # the loss may have been seen by another thread while the publisher's waits for longer
        else:
            self._bury(endpoint, reason)
        self.fail(failures)

    def _abandon(self, endpoint: Endpoint, reason: str) -> None:
        """Give up an endpoint that never had a link: it was told nothing."""
        logger.warning("rd2h: cannot connect to Decode %s:%s: %s", endpoint.key.host, endpoint.key.port, reason)
        failures = endpoint.open_failures(f"Decode {endpoint.key.host}:{endpoint.key.port}: {reason}")
        endpoint.lost(reason)
        if self.endpoints.get(endpoint.key) is endpoint:
            del self.endpoints[endpoint.key]
        self._stats.add(endpoints_lost=1)
        endpoint.outbox.clear()
        self._bury(endpoint, reason)
        self.fail(failures)

    def _bury(self, endpoint: Endpoint, reason: str) -> None:
        """This Decode generation can no longer use anything it reads: open all its gates."""
        link = self._links.get(endpoint.number)
        if link is not None:
            self._lose(link, reason)
        if endpoint in self._fading:
            self._fading.remove(endpoint)
        self.gates.give_up(endpoint.number)
        endpoint.unacknowledged.clear()
