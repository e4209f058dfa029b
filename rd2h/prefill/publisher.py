"""Prefill's publisher: tells every Decode endpoint which layers are ready, and keeps storage gated until it has read.

The forward thread calls ``publish`` and ``wait_writable``. A message to an endpoint that is ready goes out on the
calling thread, so nothing is handed over on the way; one background thread does all the rest: it connects, receives and
watches time limits, and runs on events only. All state and sockets are under one lock, which is never held while
waiting. A dead or slow endpoint delays nobody else: every endpoint is a non-blocking state of its own.

Bounds: ``MAX_ENDPOINTS`` endpoints, ``MAX_OUTBOX`` queued messages an endpoint, ``MAX_STOPPED`` remembered tokens;
connect and handshake have deadlines; a sent message stays gated until acknowledged, or until nothing has been heard
from its Decode for ``peer_timeout_s`` (see ``rd2h.lease`` for why that is safe), or until a new generation answers on
the same address.
"""

import logging
import math
import select
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import zmq

from rd2h.errors import QueueFullError, StateError, WireError
from rd2h.gates import GateEntry, Slot, SlotGates, Writes
from rd2h.prefill.device import DeviceOrder, WaitForDevice
from rd2h.prefill.endpoint import MAX_OUTBOX, Endpoint, EndpointChunk, EndpointKey, EndpointState, LayerMessage
from rd2h.prefill.link import Link, LinkEvent
from rd2h.prefill.options import PublisherOptions, SourceMemory
from rd2h.stats import TransferStats
from rd2h.wakeup import Wakeup
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

__all__ = ["Publisher", "PublisherOptions", "SourceMemory"]

logger = logging.getLogger(__name__)

MAX_ENDPOINTS = 4096
MAX_STOPPED = 65536
Clock = Callable[[], float]


class Publisher:
    """See the module. ``on_failure`` is called from any thread, without the lock, with children that get no more KV."""

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
        self._fresh: list[Endpoint] = []
        """Endpoints without a socket yet."""
        self._links: dict[int, Link] = {}
        self._by_fd: dict[int, Link] = {}
        self._unattended: set[Link] = set()
        """Links with messages that no descriptor will tell about: the sending thread swallowed the edge."""
        self._failed: list[Refusal] = []
        self._stopped: OrderedDict[bytes, str] = OrderedDict()
        self._next_seq = 0
        self._next_endpoint = 0
        self._stopping = False
        self._check_at_s = math.inf
        self._device = DeviceOrder()
        self._wakeup = Wakeup()
        self._context: zmq.Context[Any] = zmq.Context(io_threads=1)
        self._epoll = select.epoll()
        self._thread = threading.Thread(target=self._run, name="rd2h-publisher", daemon=True)

    def start(self) -> None:
        """Start the background thread."""
        self._epoll.register(self._wakeup.fd, select.EPOLLIN)
        self._thread.start()

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the thread and close all connections; waiting writers are released."""
        self._device.close(timeout_s)
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._wakeup.set()
            self._thread.join(timeout_s)

    @property
    def alive(self) -> bool:
        """Whether the background thread runs."""
        return self._thread.is_alive() and self._device.alive

    # --- forward thread ---

    def publish(
        self,
        layer_idx: int,
        chunks: Sequence[EndpointChunk],
        *,
        last_layer: bool,
        after: WaitForDevice | None = None,
    ) -> None:
        """Close the gates of this layer and send its ready messages, or queue them; returns at once.

        With ``after`` they go out when it has returned, on another thread: the device has not written the layer yet.
        """
        now = self._clock()
        held: list[tuple[Endpoint, LayerMessage]] = []
        with self._changed:
            slots = self._memory.slots[layer_idx]
            for chunk in chunks:
                try:
                    endpoint = self._endpoint(chunk.key, now)
                    if len(endpoint.outbox) + len(endpoint.unacknowledged) >= MAX_OUTBOX:
                        raise QueueFullError(f"{MAX_OUTBOX} ready messages are outstanding for {chunk.key}")
                except (QueueFullError, StateError) as error:
                    self._fail(Refusal(token, str(error)) for token in chunk.tokens)
                    continue
                self._next_seq += 1
                message = LayerMessage(self._next_seq, layer_idx, last_layer, chunk)
                self._gates.close(GateEntry(endpoint.number, message.seq, layer_idx, slots, chunk.blocks))
                if after is not None:
                    held.append((endpoint, message))
                    continue
                endpoint.outbox.append(message)
                self._flush_from_outside(endpoint)
        if after is not None and held:
            self._device.then(after, lambda error: self._written(held, error))
        self._report()

    def _written(self, held: Sequence[tuple[Endpoint, LayerMessage]], error: str) -> None:
        """The device has written the layer of these messages, or has failed."""
        with self._changed:
            for endpoint, message in held:
                if endpoint.usable and not error:
                    endpoint.outbox.append(message)
                    self._flush_from_outside(endpoint)
                    continue
                # Nobody was told, so nobody reads.
                self._gates.give_up_where(endpoint.number, [message.seq])
                self._changed.notify_all()
                self._fail(Refusal(token, error or endpoint.reason) for token in message.chunk.tokens)
        self._report()

    def fail_children(self, key: EndpointKey, failures: Sequence[Refusal]) -> None:
        """Tell a Decode that Prefill will not deliver these children, and stop publishing them."""
        now = self._clock()
        with self._changed:
            for failure in failures:
                self._stop(failure.token, failure.reason)
            if key.generation is not None:
                try:
                    endpoint = self._endpoint(key, now)
                except (QueueFullError, StateError):
                    return
                endpoint.notices.append(encode_prefill_failed(key.generation, failures))
                self._flush_from_outside(endpoint)
        self._report()

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
        if self._stopping:
            # A dead publisher costs these requests, never the engine.
            raise StateError("the publisher is not running")
        endpoint = self._endpoints.get(key)
        if endpoint is not None and endpoint.usable:
            return endpoint
        if len(self._endpoints) >= MAX_ENDPOINTS:
            raise QueueFullError(f"{MAX_ENDPOINTS} Decode endpoints are already in use")
        self._next_endpoint += 1
        endpoint = Endpoint(self._next_endpoint, key, now_s + self._options.connect_timeout_s)
        self._endpoints[key] = endpoint
        self._fresh.append(endpoint)
        self._wakeup.set()
        return endpoint

    def _stop(self, token: bytes, reason: str) -> bool:
        if token in self._stopped:
            return False
        self._stopped[token] = reason
        while len(self._stopped) > MAX_STOPPED:
            self._stopped.popitem(last=False)
        return True

    def _fail(self, failures: Iterable[Refusal]) -> None:
        """Note children that get no more KV, each once; ``_report`` must follow without the lock."""
        self._failed += [failure for failure in failures if self._stop(failure.token, failure.reason)]

    def _flush_from_outside(self, endpoint: Endpoint) -> None:
        """Flush on a thread that does not receive: what it leaves in the socket must reach the one that does."""
        link = self._links.get(endpoint.number)
        if link is not None:
            self._flush(link)
            if link.receivable:
                self._unattended.add(link)
                self._wakeup.set()

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

    def _report(self) -> None:
        """Hand noted failures out. Without the lock."""
        if self._failed:
            with self._changed:
                failed, self._failed = self._failed, []
            if failed:
                self._on_failure(failed)

    # --- background thread ---

    def _run(self) -> None:
        try:
            while not self._stopping:
                timeout_s = None if self._check_at_s == math.inf else max(0.0, self._check_at_s - self._clock())
                events = self._epoll.poll(timeout_s)
                with self._changed:
                    self._step([fd for fd, _ in events])
                self._report()
        except Exception:
            logger.exception("rd2h publisher thread died")
            raise
        finally:
            with self._changed:
                self._stopping = True
                for link in self._links.values():
                    self._unwatch(link)
                    link.close()
                self._links.clear()
                self._changed.notify_all()
            self._context.term()
            self._epoll.close()

    def _step(self, fds: Sequence[int]) -> None:
        """Handle events; all below runs under the lock."""
        touched = {link for fd in fds if (link := self._by_fd.get(fd)) is not None}
        if self._wakeup.fd in fds:
            self._wakeup.clear()
            touched |= self._unattended
            self._unattended.clear()
            self._connect_fresh()
        open_gates = len(self._gates)
        for link in touched:
            # Handling one link may close another (a new generation replaces an old one).
            if self._links.get(link.endpoint.number) is link:
                self._receive(link, monitored=link.fds[1] in fds)
        if self._clock() >= self._check_at_s:
            self._check_times()
        if len(self._gates) < open_gates:
            self._changed.notify_all()

    def _connect_fresh(self) -> None:
        fresh, self._fresh = self._fresh, []
        for endpoint in fresh:
            link = Link(endpoint, self._context, self._options.connect_timeout_s)
            self._links[endpoint.number] = link
            for fd in link.fds:
                self._by_fd[fd] = link
                self._epoll.register(fd, select.EPOLLIN | select.EPOLLET)
            self._check_by(endpoint.deadline_s)
            if link.unusable:
                self._lose(link, "its address cannot be used")
            else:
                self._receive(link, monitored=True)  # a ZeroMQ descriptor tells nothing before a first look

    def _unwatch(self, link: Link) -> None:
        for fd in link.fds:
            del self._by_fd[fd]
            self._epoll.unregister(fd)
        self._unattended.discard(link)

    def _check_by(self, deadline_s: float) -> None:
        """Time limits must be looked at then; deadlines that move later are found again at that time."""
        self._check_at_s = min(self._check_at_s, deadline_s)

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
        if isinstance(message, ReadDone | ReadFailed):
            endpoint.heard(now)
            self._acknowledge(endpoint, message, now)
            if endpoint.legacy:
                self._flush(link)
        elif isinstance(message, Ping):
            endpoint.heard(now)
            link.send(encode_pong(self._memory.peer.generation, message.clock_ns))
        elif isinstance(message, StopSending):
            if message.generation == self._memory.peer.generation:
                endpoint.heard(now)
                for token in message.tokens:
                    self._stop(token, "Decode no longer wants it")
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
        for other in [*self._endpoints.values(), *self._fading]:
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
        self._gates.acknowledge(endpoint.number, message.seq, message.layer_idx)
        self._stats.add(acks=1, ack_seconds=now_s - sent_s)
        if isinstance(reply, ReadFailed):
            self._fail(Refusal(token, reply.error) for token in message.chunk.tokens)
        elif reply.refused:
            mine = set(message.chunk.tokens)
            self._fail(refusal for refusal in reply.refused if refusal.token in mine)

    # --- time limits and loss ---

    def _check_times(self) -> None:
        now = self._clock()
        for link in list(self._links.values()):
            endpoint = link.endpoint
            due_s = endpoint.give_up_at_s(self._options.peer_timeout_s)
            if now >= due_s and endpoint.state is EndpointState.READY:
                self._lose(link, f"nothing heard for {self._options.peer_timeout_s:g} s")
            elif now >= due_s:
                self._lose(link, f"no answer while {endpoint.state.name.lower()}")
        for endpoint in list(self._fading):
            if now >= endpoint.give_up_at_s(self._options.peer_timeout_s):
                self._bury(endpoint, endpoint.reason)
        known = [*(link.endpoint for link in self._links.values()), *self._fading]
        self._check_at_s = min((e.give_up_at_s(self._options.peer_timeout_s) for e in known), default=math.inf)

    def _lose(self, link: Link, reason: str) -> None:
        """The connection is over: its children fail; what was sent stays gated while Decode may still use it."""
        endpoint = link.endpoint
        if not endpoint.usable:
            return
        logger.warning("rd2h: lost Decode %s:%s: %s", endpoint.key.host, endpoint.key.port, reason)
        failures = endpoint.open_failures(f"Decode {endpoint.key.host}:{endpoint.key.port}: {reason}")
        handshaken = endpoint.state is EndpointState.READY
        endpoint.lost(reason)
        if self._endpoints.get(endpoint.key) is endpoint:
            del self._endpoints[endpoint.key]
        self._stats.add(endpoints_lost=1)
        self._unwatch(link)
        link.close()
        del self._links[endpoint.number]
        self._gates.give_up_where(endpoint.number, [message.seq for message in endpoint.outbox])
        endpoint.outbox.clear()
        endpoint.notices.clear()
        due_s = endpoint.give_up_at_s(self._options.peer_timeout_s)
        if handshaken and self._clock() < due_s:
            self._fading.append(endpoint)
            self._check_by(due_s)
        else:
            self._bury(endpoint, reason)
        self._fail(failures)

    def _bury(self, endpoint: Endpoint, reason: str) -> None:
        """This Decode generation can no longer use anything it reads: open all its gates."""
        link = self._links.get(endpoint.number)
        if link is not None:
            self._lose(link, reason)
        if endpoint in self._fading:
            self._fading.remove(endpoint)
        self._gates.give_up(endpoint.number)
        endpoint.unacknowledged.clear()
