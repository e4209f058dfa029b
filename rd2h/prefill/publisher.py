"""Prefill's publisher: tells every Decode endpoint which layers are ready, and keeps storage gated until it has read.

The forward thread calls ``publish`` and ``wait_writable``; one background thread owns all sockets and runs on events
only. A dead or slow endpoint delays nobody else: every endpoint is a non-blocking state of its own.

Bounds: ``MAX_ENDPOINTS`` endpoints, ``MAX_OUTBOX`` queued messages an endpoint, ``MAX_STOPPED`` remembered tokens;
connect and handshake have deadlines; a sent message stays gated until acknowledged, or until nothing has been heard
from its Decode for ``peer_timeout_s`` (see ``rd2h.lease`` for why that is safe), or until a new generation answers on
the same address.
"""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import zmq

from rd2h.errors import QueueFullError, WireError
from rd2h.gates import GateEntry, Slot, SlotGates, Writes
from rd2h.prefill.endpoint import MAX_OUTBOX, Endpoint, EndpointChunk, EndpointKey, EndpointState, LayerMessage
from rd2h.prefill.link import Link, LinkEvent
from rd2h.stats import TransferStats
from rd2h.wakeup import Wakeup
from rd2h.wire import (
    LegacyAck,
    MfAck,
    PeerInfo,
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


@dataclass(frozen=True, slots=True)
class PublisherOptions:
    """Times in seconds."""

    peer_timeout_s: float = 20.0
    connect_timeout_s: float = 5.0
    handshake_timeout_s: float = 10.0


@dataclass(frozen=True, slots=True)
class SourceMemory:
    """What a Prefill rank publishes about itself."""

    session: str
    encoded_layers: bytes
    layer_names: Sequence[str]
    slots: Sequence[tuple[Slot, ...]]
    """Physical slots of each layer."""
    peer: PeerInfo


class Publisher:
    """See the module. ``on_failure`` is called from the background thread with children that will get no more KV."""

    def __init__(
        self,
        memory: SourceMemory,
        options: PublisherOptions,
        stats: TransferStats,
        on_failure: Callable[[Sequence[Refusal]], None],
        clock: Clock = time.monotonic,
    ) -> None:
        self._memory, self._options, self._stats, self._on_failure = memory, options, stats, on_failure
        self._clock = clock
        self._changed = threading.Condition()
        self._gates = SlotGates()
        self._endpoints: dict[EndpointKey, Endpoint] = {}
        self._fading: list[Endpoint] = []
        self._inbox: deque[tuple[Endpoint, LayerMessage]] = deque()
        self._stopped: OrderedDict[bytes, str] = OrderedDict()
        self._next_seq = 0
        self._next_endpoint = 0
        self._stopping = False
        self._links: dict[int, Link] = {}
        self._wakeup = Wakeup()
        self._context = zmq.Context(io_threads=1)
        self._poller = zmq.Poller()
        self._thread = threading.Thread(target=self._run, name="rd2h-publisher", daemon=True)

    def start(self) -> None:
        """Start the background thread."""
        self._poller.register(self._wakeup.fd, zmq.POLLIN)
        self._thread.start()

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the thread and close all connections; waiting writers are released."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._wakeup.set()
            self._thread.join(timeout_s)

    @property
    def alive(self) -> bool:
        """Whether the background thread runs."""
        return self._thread.is_alive()

    # --- forward thread ---

    def publish(self, layer_idx: int, chunks: Sequence[EndpointChunk], *, last_layer: bool) -> None:
        """Close the gates of this layer and queue its ready messages; returns at once."""
        now = self._clock()
        failures: list[Refusal] = []
        with self._changed:
            if self._stopping:
                # A dead publisher costs these requests, never the engine.
                failures = [
                    Refusal(token, "the publisher is not running") for chunk in chunks for token in chunk.tokens
                ]
                chunks = ()
            for chunk in chunks:
                try:
                    endpoint = self._endpoint(chunk.key, now)
                    if len(endpoint.outbox) + len(endpoint.unacknowledged) >= MAX_OUTBOX:
                        raise QueueFullError(f"{MAX_OUTBOX} ready messages are outstanding for {chunk.key}")
                except QueueFullError as error:
                    failures += [Refusal(token, str(error)) for token in chunk.tokens]
                    continue
                self._next_seq += 1
                message = LayerMessage(self._next_seq, layer_idx, last_layer, chunk)
                slots = self._memory.slots[layer_idx]
                self._gates.close(GateEntry(endpoint.number, message.seq, layer_idx, slots, chunk.blocks))
                self._inbox.append((endpoint, message))
        self._wakeup.set()
        self._fail(failures)

    def fail_children(self, key: EndpointKey, failures: Sequence[Refusal]) -> None:
        """Tell a Decode that Prefill will not deliver these children, and stop publishing them."""
        now = self._clock()
        with self._changed:
            for failure in failures:
                self._stop(failure.token, failure.reason)
            if key.generation is not None and not self._stopping:
                try:
                    endpoint = self._endpoint(key, now)
                except QueueFullError:
                    return
                endpoint.notices.append(encode_prefill_failed(key.generation, failures))
        self._wakeup.set()

    def stopped(self, token: bytes) -> str | None:
        """Why a child is no longer published, or None."""
        with self._changed:
            return self._stopped.get(token)

    def wait_writable(self, slots: Iterable[Slot] | None, writes: Writes) -> None:
        """Block until no Decode may still read what these writes overwrite.

        Ends for every entry: it is acknowledged, or its endpoint never got it, or its Decode is given up.
        """
        if not len(self._gates):
            return
        wanted = list(slots) if slots is not None else None
        with self._changed:
            if not self._gates.blocking(wanted, writes):
                return
            begin = time.monotonic()
            while not self._stopping and self._gates.blocking(wanted, writes):
                self._changed.wait()
        self._stats.add(gate_waits=1, gate_wait_seconds=time.monotonic() - begin)

    def outstanding(self) -> int:
        """Ready messages that are not yet acknowledged or given up."""
        with self._changed:
            return len(self._gates)

    # --- shared, under the lock ---

    def _endpoint(self, key: EndpointKey, now_s: float) -> Endpoint:
        endpoint = self._endpoints.get(key)
        if endpoint is not None and endpoint.usable:
            return endpoint
        if len(self._endpoints) >= MAX_ENDPOINTS:
            raise QueueFullError(f"{MAX_ENDPOINTS} Decode endpoints are already in use")
        self._next_endpoint += 1
        endpoint = Endpoint(self._next_endpoint, key, now_s + self._options.connect_timeout_s)
        self._endpoints[key] = endpoint
        return endpoint

    def _stop(self, token: bytes, reason: str) -> bool:
        if token in self._stopped:
            return False
        self._stopped[token] = reason
        while len(self._stopped) > MAX_STOPPED:
            self._stopped.popitem(last=False)
        return True

    def _fail(self, failures: Sequence[Refusal]) -> None:
        if not failures:
            return
        with self._changed:
            fresh = [failure for failure in failures if self._stop(failure.token, failure.reason)]
        if fresh:
            self._on_failure(fresh)

    # --- background thread ---

    def _run(self) -> None:
        try:
            while not self._stopping:
                events = dict(self._poller.poll(self._timeout_ms()))
                if self._wakeup.fd in events:
                    self._wakeup.clear()
                for link in list(self._links.values()):
                    # Handling one link may close another (a new generation replaces an old one).
                    if self._links.get(link.endpoint.number) is link and link.has_events(events):
                        self._receive(link)
                self._take_inbox()
                self._check_times()
        except Exception:
            logger.exception("rd2h publisher thread died")
            raise
        finally:
            for link in self._links.values():
                link.close(self._poller)
            self._context.term()
            with self._changed:
                self._stopping = True
                self._changed.notify_all()

    def _timeout_ms(self) -> int | None:
        deadlines = []
        with self._changed:
            for endpoint in (*self._endpoints.values(), *self._fading):
                if endpoint.state in (EndpointState.CONNECTING, EndpointState.HANDSHAKING):
                    deadlines.append(endpoint.deadline_s)
                elif (at := endpoint.give_up_at_s(self._options.peer_timeout_s)) is not None:
                    deadlines.append(at)
        if not deadlines:
            return None
        return max(0, int((min(deadlines) - self._clock()) * 1000) + 1)

    def _take_inbox(self) -> None:
        with self._changed:
            inbox, self._inbox = self._inbox, deque()
            for endpoint, message in inbox:
                endpoint.outbox.append(message)
            fresh = [e for e in self._endpoints.values() if e.number not in self._links and e.usable]
            dropped = [(e, m) for e, m in inbox if not e.usable]
        for endpoint in fresh:
            self._links[endpoint.number] = Link(endpoint, self._context, self._poller, self._options.connect_timeout_s)
        for endpoint, _ in dropped:
            self._release_unsent(endpoint)
        for link in list(self._links.values()):
            if link.unusable:
                self._lose(link, "its address cannot be used")
            else:
                self._flush(link)

    def _flush(self, link: Link) -> None:
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
        if count:
            self._stats.add(layers_published=count)

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

    def _receive(self, link: Link) -> None:
        event = link.take_event()
        if event is LinkEvent.CONNECTED and link.endpoint.state is EndpointState.CONNECTING:
            link.endpoint.connected(self._clock() + self._options.handshake_timeout_s)
            peer = None if link.endpoint.legacy else self._memory.peer
            link.send(encode_mf_meta(self._memory.session, self._memory.encoded_layers, peer))
        for payload in link.receive():
            try:
                self._handle(link, payload)
            except WireError as error:
                self._stats.add(frames_malformed=1)
                if link.complain_once():
                    logger.warning("rd2h: malformed reply from Decode %s: %s", link.endpoint.key, error)
        if event is LinkEvent.LOST:
            self._lose(link, "the connection was lost")

    def _handle(self, link: Link, payload: bytes) -> None:
        message = decode_from_decode(payload)
        endpoint = link.endpoint
        now = self._clock()
        if isinstance(message, ReadDone | ReadFailed):
            endpoint.heard(now)
            self._acknowledge(endpoint, message, now)
        elif isinstance(message, Ping):
            endpoint.heard(now)
            link.send(encode_pong(self._memory.peer.generation, message.clock_ns))
        elif isinstance(message, StopSending):
            if message.generation == self._memory.peer.generation:
                endpoint.heard(now)
                with self._changed:
                    for token in message.tokens:
                        self._stop(token, "Decode no longer wants it")
        elif isinstance(message, MfAck):
            self._handshaken(link, message, now)
        elif isinstance(message, LegacyAck) and endpoint.legacy:
            endpoint.acknowledged(now)

    def _handshaken(self, link: Link, ack: MfAck, now_s: float) -> None:
        endpoint = link.endpoint
        if ack.generation != endpoint.key.generation:
            self._lose(link, f"generation {ack.generation} answers where {endpoint.key.generation} was advertised")
            return
        if ack.error:
            endpoint.notices.clear()
            failures = endpoint.open_failures(ack.error)
            link.send(encode_prefill_failed(ack.generation, failures))
            self._lose(link, ack.error)
            return
        # The echo comes before the first ready message, so Decode's read lease runs when it reads.
        link.send(encode_pong(self._memory.peer.generation, ack.clock_ns))
        endpoint.acknowledged(now_s)
        with self._changed:
            known = [*self._endpoints.values(), *self._fading]
        for other in known:
            if other.key[:2] == endpoint.key[:2] and other.key.generation != ack.generation:
                # Only one process can own the port: the older generation is gone for good.
                self._bury(other, "a new generation answers on its address")

    def _acknowledge(self, endpoint: Endpoint, reply: ReadDone | ReadFailed, now_s: float) -> None:
        found = endpoint.match(reply.layer_idx, reply.seq)
        if found is None:
            self._stats.add(acks_ignored=1)
            return
        message, sent_s = found
        with self._changed:
            self._gates.acknowledge(endpoint.number, message.seq, message.layer_idx)
            self._changed.notify_all()
        self._stats.add(acks=1, ack_seconds=now_s - sent_s)
        if isinstance(reply, ReadFailed):
            self._fail([Refusal(token, reply.error) for token in message.chunk.tokens])
        elif reply.refused:
            mine = set(message.chunk.tokens)
            self._fail([refusal for refusal in reply.refused if refusal.token in mine])

    # --- loss ---

    def _check_times(self) -> None:
        now = self._clock()
        for link in list(self._links.values()):
            endpoint = link.endpoint
            if endpoint.state in (EndpointState.CONNECTING, EndpointState.HANDSHAKING):
                if now >= endpoint.deadline_s:
                    self._lose(link, f"no answer while {endpoint.state.name.lower()}")
            elif not endpoint.legacy and self._silent(endpoint, now):
                self._lose(link, f"nothing heard for {self._options.peer_timeout_s:g} s")
        for endpoint in list(self._fading):
            if self._silent(endpoint, now):
                self._bury(endpoint, endpoint.reason)

    def _silent(self, endpoint: Endpoint, now_s: float) -> bool:
        at = endpoint.give_up_at_s(self._options.peer_timeout_s)
        return at is not None and now_s >= at

    def _lose(self, link: Link, reason: str) -> None:
        endpoint = link.endpoint
        if endpoint.state is EndpointState.LOST:
            return
        handshaken = endpoint.state is EndpointState.READY
        failures = endpoint.open_failures(f"Decode {endpoint.key.host}:{endpoint.key.port}: {reason}")
        logger.warning("rd2h: lost Decode %s:%s: %s", endpoint.key.host, endpoint.key.port, reason)
        with self._changed:
            endpoint.lost(reason)
            if self._endpoints.get(endpoint.key) is endpoint:
                del self._endpoints[endpoint.key]
            self._fading.append(endpoint)
        self._stats.add(endpoints_lost=1)
        link.close(self._poller)
        del self._links[endpoint.number]
        self._release_unsent(endpoint)
        if not handshaken or self._silent(endpoint, self._clock()):
            self._bury(endpoint, reason)
        self._fail(failures)

    def _release_unsent(self, endpoint: Endpoint) -> None:
        """Open the gates of what a lost endpoint was never told."""
        failures = [Refusal(token, endpoint.reason) for message in endpoint.outbox for token in message.chunk.tokens]
        with self._changed:
            self._gates.give_up_where(endpoint.number, [message.seq for message in endpoint.outbox])
            endpoint.outbox.clear()
            endpoint.notices.clear()
            self._changed.notify_all()
        self._fail(failures)

    def _bury(self, endpoint: Endpoint, reason: str) -> None:
        """This Decode generation can no longer use anything it reads: open all its gates."""
        link = self._links.get(endpoint.number)
        if link is not None:
            self._lose(link, reason)
        with self._changed:
            if endpoint in self._fading:
                self._fading.remove(endpoint)
            self._gates.give_up(endpoint.number)
            endpoint.unacknowledged.clear()
            self._changed.notify_all()
