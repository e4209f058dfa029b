"""All state that Decode's receiving and reading threads share, under one lock that is never held while waiting.

Every decision about a message is taken here: who may be read from, what is refused, what waits, what an end of a read
means. The puller around it only moves bytes between sockets, engine and this book.
"""

import logging
import threading
from collections.abc import Sequence

from rd2h.children import ChildSpec, ChildTable, FailureKind, Finished, Outcome
from rd2h.decode.connection import MAX_JOBS, Connection, Job
from rd2h.decode.destination import Destination
from rd2h.decode.handshake import contributor_of
from rd2h.decode.options import PullerOptions
from rd2h.decode.planner import ReadPlanner
from rd2h.decode.router import Received
from rd2h.decode.steps import Answer, ReadEnd, ReadTask
from rd2h.errors import LayoutError, RequestError, TopologyError, WireError
from rd2h.layout import decode_layer_map
from rd2h.lease import ReadLease
from rd2h.stats import TransferStats, failures_of
from rd2h.wire import (
    LEGACY_ACK,
    MfMeta,
    Ping,
    Pong,
    PrefillFailed,
    ReadyHead,
    decode_from_prefill,
    encode_mf_ack,
    encode_pong,
    encode_read_done,
    encode_read_failed,
)

logger = logging.getLogger(__name__)

MAX_STRANGERS = 1024


class PullBook:
    """See the module."""

    def __init__(self, options: PullerOptions, destination: Destination, stats: TransferStats) -> None:
        self._options, self._destination, self._stats = options, destination, stats
        self._lock = threading.Lock()
        self._table = ChildTable(options.idle_timeout_s)
        self._planner = ReadPlanner(options, destination, self._table)
        self._parked: dict[bytes, float] = {}
        self._closed = False
        self._strangers: set[str] = set()
        """Addresses without a connection that have sent a malformed frame, which is logged once."""
        self.connections: dict[bytes, Connection] = {}

    # --- from the connector ---

    def add(self, specs: Sequence[ChildSpec], now_s: float) -> list[Connection]:
        """Register destinations; returns connections whose parked message may go ahead."""
        with self._lock:
            for spec in specs:
                self._table.add(spec, now_s)
            return self._unpark(list(self._parked))

    def trust(self, generations: frozenset[int], now_s: float) -> list[Connection]:
        """Prefill generations that may be read from; requests of a generation that has gone fail."""
        with self._lock:
            gone, self._planner.trusted = self._planner.trusted - generations, generations
            for connection in self.connections.values():
                if connection.peer is not None and connection.peer.generation in gone:
                    self._fail_source(connection, "its Prefill generation is no longer registered", now_s)
            return self._unpark(list(self._parked))

    def abort(self, request_ids: Sequence[str], now_s: float) -> list[tuple[Connection, int, bytes]]:
        """Fence requests; returns (connection, Prefill generation, token) to notify."""
        notify = []
        with self._lock:
            for request_id in request_ids:
                token = self._table.token_of_request(request_id)
                if token is None:
                    continue
                sources = self._sources(token)
                self._table.abort(request_id, now_s)
                notify += [(connection, generation, token) for connection, generation in sources]
        return notify

    def fail(self, token: bytes, reason: str, now_s: float) -> list[tuple[Connection, int]]:
        """End a child; returns (connection, Prefill generation) to notify."""
        with self._lock:
            sources = self._sources(token)
            self._table.fail(token, reason, now_s, kind=FailureKind.PREFILL_FAILED)
            return sources

    def take_finished(self, now_s: float) -> list[Finished]:
        """Children that became final."""
        with self._lock:
            self._table.expire(now_s)
            finished = self._table.take_finished()
        for child in finished:
            failed = child.outcome is Outcome.FAILED
            self._stats.add(**{failures_of(child.kind) if failed else f"children_{child.outcome.value}": 1})
        return finished

    def counts(self) -> tuple[int, int, int]:
        """(children, parked connections, reads in flight)."""
        with self._lock:
            return len(self._table), len(self._parked), self._table.reads_in_flight

    def close(self) -> None:
        """No new read starts."""
        with self._lock:
            self._closed = True

    # --- from the receiving thread ---

    def accept(self, received: Received, now_s: float, now_ns: int) -> tuple[Connection | None, Answer | None]:
        """Take in one frame; returns a connection to serve and an answer to send, each if there is one."""
        connection = self.connections.get(received.identity)
        # Nothing is kept for a connection whose metadata was refused: anybody can open those.
        splitter = connection.splitter if connection is not None and connection.session is not None else None
        try:
            message = decode_from_prefill(received.payload, splitter)
        except WireError as error:
            self._malformed(connection, received, error)
            return None, None
        if isinstance(message, Ping):
            return None, Answer((encode_pong(self._options.generation, message.clock_ns),))
        with self._lock:
            connection = self.connections.get(received.identity)  # it may have been dropped meanwhile
            if connection is not None and isinstance(message, ReadyHead):
                return self._enqueue(connection, message, now_s)
            if isinstance(message, MfMeta):
                connection = connection or self._admit(received, now_s)
                return (None, None) if connection is None else self._enqueue(connection, message, now_s)
            if connection is None:
                if not isinstance(message, ReadyHead):
                    return None, None
                self._stats.add(messages_refused=1)
                text = "no metadata was sent on this connection"
                if message.seq is None:
                    return None, Answer((encode_read_failed(message.layer_idx, text, None),))
                # It was forgotten here, and its Prefill does not know: make it begin again.
                return None, Answer((encode_mf_ack(self._options.generation, now_ns, text),))
            connection.heard_s, connection.silent = now_s, False
            if isinstance(message, Pong):
                if connection.peer is not None and message.generation == connection.peer.generation:
                    connection.lease.echoed(message.clock_ns, now_ns)
            elif isinstance(message, PrefillFailed) and message.generation == self._options.generation:
                for failure in message.failures:
                    reason = f"Prefill failed: {failure.reason}"
                    self._table.fail(failure.token, reason, now_s, kind=FailureKind.PREFILL_FAILED)
                    # Its destination may come only now.
                    self._table.refuse(failure.token, reason, FailureKind.PREFILL_FAILED)
        return None, None

    def next_deadline_s(self) -> float | None:
        """When the first parked message has waited long enough."""
        with self._lock:
            return min(self._parked.values(), default=None)

    def unpark_due(self, now_s: float) -> list[Connection]:
        """Connections whose parked message has waited long enough."""
        with self._lock:
            return self._unpark([identity for identity, due in self._parked.items() if now_s >= due])

    def to_ping(self, now_s: float) -> list[bytes]:
        """Identities to send a heartbeat to; children of a Prefill that has gone silent fail here."""
        with self._lock:
            extended = [c for c in self.connections.values() if c.peer is not None]
            for connection in extended:
                if not connection.silent and now_s - connection.heard_s > self._options.peer_timeout_s:
                    connection.silent = True
                    self._fail_source(connection, "nothing was heard from Prefill", now_s)
            return [connection.identity for connection in extended]

    def drop(self, identity: bytes, reason: str, now_s: float) -> None:
        """The peer is gone."""
        with self._lock:
            connection = self.connections.get(identity)
            if connection is not None:
                self._forget(connection, reason, now_s)

    # --- from the reading threads ---

    def next_step(self, connection: Connection, now_s: float, now_ns: int) -> ReadTask | Answer | None:
        """The next thing to do for a connection by the thread that has its turn; None when the turn is over.

        After a ``ReadTask`` with the turn kept ``finish_read`` must follow, else ``read_returned``.
        """
        with self._lock:
            running = connection.running
            if running and (ended := running[0].ended) is not None:
                return self._finish(connection, running.popleft().task, ended, now_s, now_ns)
            if self._closed or connection.parked or not connection.jobs or not self._planner.may_begin(connection):
                connection.busy = False
                return None
            job = connection.jobs[0]
            due_s = job.arrived_s + self._options.park_timeout_s
            refusal = ""
            if isinstance(job.message, ReadyHead):
                try:
                    task = self._planner.task(connection, job.message, now_s >= due_s)
                except (WireError, LayoutError, RequestError) as error:
                    task, refusal = None, str(error)
                if task is not None:
                    return task
                if not refusal:
                    connection.busy, connection.parked = False, True
                    self._parked[connection.identity] = due_s
                    self._stats.add(messages_parked=1)
                    return None
            if running:
                connection.busy = False  # answered in order: after these reads
                return None
            connection.jobs.popleft()
            if isinstance(job.message, MfMeta):
                return self._metadata(connection, job.message)
            return self._refuse(connection, job.message, refusal, now_s)

    def read_returned(self, connection: Connection, task: ReadTask, ended: ReadEnd) -> bool:
        """A read that ran without the turn has returned; whether the caller has the turn now and must go on."""
        with self._lock:
            for read in connection.running:
                if read.task is task:
                    read.ended = ended
            if connection.busy and not self._closed:
                return False  # who has the turn finds it, unless a stopping thread left it in the queue
            connection.busy = True
            return True

    def finish_read(self, connection: Connection, task: ReadTask, ended: ReadEnd, now_s: float, now_ns: int) -> Answer:
        """A read that ran with the turn has returned; what Prefill hears."""
        with self._lock:
            return self._finish(connection, task, ended, now_s, now_ns)

    def session_opened(self, connection: Connection, now_ns: int, error: str) -> Answer:
        """Answer to metadata, now that the engine knows the session (or refuses it)."""
        with self._lock:
            if error:
                connection.session = None
                logger.warning("rd2h: cannot read from Prefill at %s: %s", connection.address, error)
            if connection.peer is None:
                return Answer(() if error else (LEGACY_ACK,))
            return Answer((encode_mf_ack(self._options.generation, now_ns, error),))

    # --- under the lock ---

    def _enqueue(
        self, connection: Connection, message: MfMeta | ReadyHead, now_s: float
    ) -> tuple[Connection | None, Answer | None]:
        connection.heard_s, connection.silent = now_s, False
        if len(connection.jobs) >= MAX_JOBS:
            self._stats.add(messages_refused=1)
            self._forget(connection, f"Prefill queued more than {MAX_JOBS} messages", now_s)
            return None, None
        connection.jobs.append(Job(message, now_s))
        if connection.busy or connection.parked or not self._planner.may_begin(connection):
            return None, None  # who has the turn, the book or a read that returns goes on with it
        connection.busy = True
        return connection, None

    def _finish(self, connection: Connection, task: ReadTask, ended: ReadEnd, now_s: float, now_ns: int) -> Answer:
        """May the bytes be used, what is complete, what does Prefill hear."""
        chunk, layers, (result, seconds, at_ns) = task.chunk, task.layers, ended
        connection.read_s = seconds
        # Who has the turn may have looked at the clocks before another thread's read returned.
        now_s, now_ns = max(now_s, at_ns / 1e9), max(now_ns, at_ns)
        error = ""
        if not result.ok:
            error = result.message or f"read failed with code {result.code}"
            reason = f"reading {layers[0].head.layer_name!r}: {error}"
            self._fail_pieces(task, reason, now_s, self._options.hold_s, FailureKind.READ_ERROR)
        elif not (task.nothing_to_read or connection.peer is None or connection.lease.valid(now_ns)):
            error = "the read lease had run out: Prefill may have reused what was read"
            self._fail_pieces(task, error, now_s, 0.0, FailureKind.LEASE_EXPIRED)
        else:
            for layer in layers:
                for token, hole in chunk.layer_read(layer.layer_idx):
                    self._table.fail(token, hole, now_s, kind=FailureKind.INCOMPLETE)
        self._table.end_read(task.read_id, now_s)
        if error:
            self._stats.add(read_errors=int(not result.ok), reads_expired=int(result.ok), read_seconds=seconds)
            return Answer(tuple([encode_read_failed(head.layer_idx, error, head.seq) for head, _, _ in layers]))
        for head, _, _ in layers:
            if head.done_ids:
                self._contributors_done(connection, head, now_s)
        refused = chunk.refused
        self._stats.add(
            layers_read=len(layers),
            bytes_read=task.descriptors.nbytes,
            read_seconds=seconds,
            requests_refused=len(layers) * len(refused),
        )
        if refused:
            refused = tuple(refusal for refusal in refused if any(refusal.token))
        if len(layers) > 1 and connection.peer is not None and connection.peer.joint_acks:
            head = layers[0].head
            also = [(other.layer_idx, other.seq or 0) for other, _, _ in layers[1:]]
            return Answer((encode_read_done(head.layer_idx, head.seq, refused, also),))
        return Answer(tuple([encode_read_done(head.layer_idx, head.seq, refused) for head, _, _ in layers]))

    def _forget(self, connection: Connection, reason: str, now_s: float) -> None:
        del self.connections[connection.identity]
        self._parked.pop(connection.identity, None)
        connection.jobs.clear()
        self._fail_source(connection, reason, now_s)

    def _admit(self, received: Received, now_s: float) -> Connection | None:
        if len(self.connections) >= self._options.max_connections:
            # Whoever opens many connections must not push out one that feeds a child.
            idle = (c for c in self.connections.values() if not (c.busy or c.jobs or c.running))
            for candidate in sorted(idle, key=lambda c: c.heard_s):
                if not self._table.feeds(candidate):
                    self._forget(candidate, "too many Prefill connections", now_s)
                    break
            else:
                self._stats.add(messages_refused=1)
                return None
        connection = Connection(received.identity, received.address, ReadLease.of(self._options.peer_timeout_s))
        self.connections[received.identity] = connection
        return connection

    def _unpark(self, identities: Sequence[bytes]) -> list[Connection]:
        freed = []
        for identity in identities:
            del self._parked[identity]
            connection = self.connections[identity]
            connection.parked = False
            if not connection.busy:
                connection.busy = True
                freed.append(connection)
        return freed

    def _metadata(self, connection: Connection, meta: MfMeta) -> Answer:
        error = ""
        try:
            layers = decode_layer_map(meta.encoded_layers)
            connection.adopt(meta, layers)
            connection.contributor = contributor_of(
                meta.peer, connection.address, self._options, self._destination.d_rank
            )
        except (LayoutError, TopologyError, RequestError) as problem:
            error = str(problem)
        if not error:
            return Answer(open_session=meta.session)
        connection.session = None
        self._stats.add(messages_refused=1)
        logger.warning("rd2h: refused Prefill at %s: %s", connection.address, error)
        return Answer(() if meta.peer is None else (encode_mf_ack(self._options.generation, 0, error),))

    def _contributors_done(self, connection: Connection, head: ReadyHead, now_s: float) -> None:
        if connection.peer is not None:
            tokens: Sequence[bytes | None] = head.done_tokens
        else:
            tokens = [self._table.token_of_external(external_id) for external_id in head.done_ids]
        for token in tokens:
            child = self._table.get(token) if token is not None else None
            if token is not None and child is not None and child.sources.get(head.member, connection) is connection:
                self._table.contributor_done(token, head.member, now_s)

    def _refuse(self, connection: Connection, head: ReadyHead, error: str, now_s: float) -> Answer:
        """A message refused as a whole: nothing is read, its children fail."""
        self._stats.add(messages_refused=1)
        if not connection.complained:
            connection.complained = True
            logger.warning("rd2h: refused a layer of Prefill at %s: %s", connection.address, error)
        try:
            chunk = connection.chunk(head, None, self._planner.shares, self._destination.layout)
            for request in chunk.requests:
                token = self._planner.token_of(request)
                child = self._table.get(token) if token is not None else None
                # The token proves that the sender reads our adverts; a contributor that is bound elsewhere stays so.
                if child is not None and child.sources.get(head.member, connection) is connection:
                    self._table.fail(child.spec.token, error, now_s, kind=FailureKind.MESSAGE_REFUSED)
        except (WireError, RequestError):
            pass  # its block lists are malformed as well; the answer below says what was wrong first
        if connection.session is None:
            connection.forget_chunks()
        return Answer((encode_read_failed(head.layer_idx, error, head.seq),))

    def _fail_pieces(self, task: ReadTask, reason: str, now_s: float, hold_s: float, kind: FailureKind) -> None:
        for piece in task.pieces:
            self._table.fail(piece.token, reason, now_s, hold_s, kind)

    def _fail_source(self, connection: Connection, reason: str, now_s: float) -> None:
        self._table.fail_source(connection, reason, now_s)

    def _sources(self, token: bytes) -> list[tuple[Connection, int]]:
        child = self._table.get(token)
        if child is None:
            return []
        bound = {id(c): c for c in child.sources.values() if isinstance(c, Connection)}
        return [(connection, connection.peer.generation) for connection in bound.values() if connection.peer]

    def _malformed(self, connection: Connection | None, received: Received, error: WireError) -> None:
        self._stats.add(frames_malformed=1)
        if connection is not None:
            known, connection.complained = connection.complained, True
        else:
            known = received.address in self._strangers
            if len(self._strangers) < MAX_STRANGERS:
                self._strangers.add(received.address)
        if not known:
            logger.warning("rd2h: malformed frame from %s: %s", received.address or "a Prefill", error)
