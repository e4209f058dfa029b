"""Which read a ready message leads to: validated, resolved to its children, with what may be read together with it."""

from rd2h.children import ChildTable
from rd2h.decode.chunks import Chunk, Shares
from rd2h.decode.connection import MAX_RUNNING, Connection
from rd2h.decode.destination import Destination
from rd2h.decode.options import PullerOptions
from rd2h.decode.steps import LayerRead, ReadTask, RunningRead, Turn
from rd2h.errors import LayoutError, RequestError, WireError
from rd2h.plan import Descriptors, LayerPair
from rd2h.wire import ReadRequest, ReadyHead

COMBINED_BYTES = 32 << 20
COMBINED_LAYERS = 8
"""Small layers of a chunk that wait together are read together, which delays the first acknowledgement: by about a
millisecond at most."""
OVERLAP_FROM_S = 100e-6
"""Reads at least this long give up their connection's turn, so that the next one copies while they are acknowledged.
Another thread costs more than it saves for shorter ones."""


class ReadPlanner:
    """Part of the pull book, under its lock. ``trusted``: Prefill generations that may be read from."""

    def __init__(self, options: PullerOptions, destination: Destination, table: ChildTable) -> None:
        self._options, self._destination, self._table = options, destination, table
        self._index_of = destination.layout.index_of()
        self.trusted: frozenset[int] = frozenset()

    def task(self, connection: Connection, head: ReadyHead, last_chance: bool) -> ReadTask | None:
        """The read of the first waiting message, ``head``, and of what waits behind it; they leave the queue.

        None to wait for what is not known yet (``last_chance``: no longer). Raises WireError, LayoutError or
        RequestError for what is refused as a whole.
        """
        layer = self._ready(connection, head, last_chance)
        if layer is None:
            return None
        chunk, layer_idx, pair = layer
        plan, session = chunk.plan, connection.session
        if plan is None or session is None:
            raise RequestError("the chunk has no plan")
        connection.jobs.popleft()
        descriptors = plan.of_pair(pair)
        layers = [LayerRead(head, layer_idx, descriptors.nbytes)]
        if connection.jobs and 2 * descriptors.nbytes <= COMBINED_BYTES:
            descriptors = self._combine(connection, chunk, layers, descriptors)
        chunk.started = True
        read_id = self._table.begin_read(chunk.tokens)
        turn = self._turn(connection)
        task = ReadTask(layers, chunk, chunk.pieces, session, descriptors, read_id, turn)
        if turn is not Turn.KEPT:
            connection.busy = turn is Turn.PASSED_ON
            connection.running.append(RunningRead(task))
        return task

    def shares(self, head: ReadyHead) -> Shares:
        """Which part of a chunk this rank pulls."""
        destination = self._destination
        return Shares(destination.d_rank, destination.d_tp, destination.split_main, head.member, head.ratio)

    def token_of(self, request: ReadRequest) -> bytes | None:
        """Token of a request, which a legacy Prefill names by its id."""
        return request.token or self._table.token_of_external(request.request_id)

    def _ready(self, connection: Connection, head: ReadyHead, last_chance: bool) -> tuple[Chunk, int, LayerPair] | None:
        """A layer that may be read now, or None to wait for what is not known yet. Raises for what is refused whole."""
        if connection.session is None:
            raise RequestError("the metadata of this connection was refused")
        peer = connection.peer
        if peer is None:
            if head.ratio != 1:
                raise RequestError(f"a legacy Prefill must have ratio 1, not {head.ratio}")
        else:
            if head.generation != self._options.generation or head.seq is None:
                raise RequestError(f"meant for Decode generation {head.generation}, this is {self._options.generation}")
            if (head.member, head.ratio) != connection.contributor:
                raise RequestError(f"member {head.member} of {head.ratio} does not fit Prefill rank {peer.tp_rank}")
            if self._options.require_registered and peer.generation not in self.trusted:
                if not last_chance:
                    return None
                raise RequestError(f"Prefill generation {peer.generation} is not registered with the meta service")
        layer_idx, pair = connection.layer(head, self._destination.layout, self._index_of)
        chunk = connection.chunk(head, layer_idx, self.shares, self._destination.layout)
        chunk.resolve(self._table, self.token_of)
        if chunk.unknown and not chunk.started:
            if not last_chance:
                return None
            for token in chunk.unknown:
                if token is not None:
                    self._table.refuse(token, "its destination was not known in time")
        return chunk, layer_idx, pair

    def may_begin(self, connection: Connection) -> bool:
        """Whether another read of this connection may begin: a second one only while half of the threads are free, so
        that two slow Prefills cannot take them all.
        """
        reads = len(connection.running)
        return not reads or (reads < MAX_RUNNING and self._threads_are_free())

    def _threads_are_free(self) -> bool:
        return 2 * self._table.reads_in_flight < self._options.read_threads

    def _turn(self, connection: Connection) -> Turn:
        # Legacy messages carry no number that would tell a repeated layer from one that is being read.
        if connection.peer is None or self._options.read_threads == 1:
            return Turn.KEPT
        # A turn is never kept while an earlier read runs: that one would be answered later.
        if connection.read_s < OVERLAP_FROM_S and not connection.running:
            return Turn.KEPT
        others_may = connection.jobs and not connection.running and self._threads_are_free()
        return Turn.PASSED_ON if others_may else Turn.GIVEN_UP

    def _combine(
        self, connection: Connection, chunk: Chunk, layers: list[LayerRead], first: Descriptors
    ) -> Descriptors:
        """Take waiting messages that may be read together with ``first``; ``layers`` grows by them."""
        jobs, plan = connection.jobs, chunk.plan
        parts, nbytes = [first], first.nbytes
        while jobs and plan is not None and len(parts) < COMBINED_LAYERS:
            head = jobs[0].message
            if not isinstance(head, ReadyHead) or head.requests_raw is not chunk.key[0]:
                break
            try:
                layer = self._ready(connection, head, False)
            except (WireError, LayoutError, RequestError):
                break  # it is refused when its turn comes
            if layer is None or layer[0] is not chunk or any(layer[1] == taken.layer_idx for taken in layers):
                break
            part = plan.of_pair(layer[2])
            nbytes += part.nbytes
            if nbytes > COMBINED_BYTES:
                break
            jobs.popleft()
            parts.append(part)
            layers.append(LayerRead(head, layer[1], part.nbytes))
        return Descriptors.joined(parts)
