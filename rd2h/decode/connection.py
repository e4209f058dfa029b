"""One Prefill rank's connection as Decode sees it: memory, lease, queue and recent chunks. Pure state."""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from rd2h.decode.chunks import Chunk, ChunkKey, Shares
from rd2h.decode.steps import RunningRead
from rd2h.errors import LayoutError, RequestError
from rd2h.layout import CacheLayout, LayerLayout, check_source
from rd2h.lease import ReadLease
from rd2h.plan import LayerPair
from rd2h.wire import MfMeta, PeerInfo, ReadyHead, ReadySplitter, decode_read_requests

MAX_JOBS = 65536
RECENT_CHUNKS = 4
MAX_RUNNING = 2
"""Reads of one connection that run at the same time."""
LayerVerdict = tuple[int, LayerPair] | str


class Job(NamedTuple):
    """A message that waits for its turn on its connection. ``arrived_s`` starts the parking time."""

    message: MfMeta | ReadyHead
    arrived_s: float


@dataclass(slots=True, eq=False)
class Connection:
    """State of one ZMQ identity. Its messages are begun and answered in order, by the thread that has its turn
    (``busy``). Reads of ``running`` go on without the turn, and are finished in their order with it.
    """

    identity: bytes
    address: str
    lease: ReadLease
    splitter: ReadySplitter = field(default_factory=ReadySplitter)
    """Used by the receiving thread only."""
    session: str | None = None
    layers: dict[str, LayerLayout] = field(default_factory=dict)
    peer: PeerInfo | None = None
    contributor: tuple[int, int] | None = None
    """(member, ratio) that follows from an extended peer's rank."""
    jobs: deque[Job] = field(default_factory=deque)
    running: deque[RunningRead] = field(default_factory=deque)
    read_s: float = 0.0
    """Time of the last read."""
    busy: bool = False
    parked: bool = False
    complained: bool = False
    heard_s: float = 0.0
    silent: bool = False
    _verdicts: dict[str, LayerVerdict] = field(default_factory=dict)
    _chunks: OrderedDict[ChunkKey, Chunk] = field(default_factory=OrderedDict)
    _latest: Chunk | None = None

    def adopt(self, meta: MfMeta, layers: dict[str, LayerLayout]) -> None:
        """New metadata: everything learned from older metadata is forgotten."""
        self.session, self.layers, self.peer = meta.session, layers, meta.peer
        self.contributor = None
        self._verdicts.clear()
        self.forget_chunks()

    def forget_chunks(self) -> None:
        """Chunks that have begun are not known any more."""
        self._chunks.clear()
        self._latest = None

    def layer(self, head: ReadyHead, layout: CacheLayout, index_of: dict[str, int]) -> tuple[int, LayerPair]:
        """(Decode's layer position, the layer on both sides), validated once per connection. Raises LayoutError."""
        verdict = self._verdicts.get(head.layer_name)
        if verdict is None:
            verdict = self._judge(head.layer_name, layout, index_of)
            if len(self._verdicts) < 2 * len(index_of):
                self._verdicts[head.layer_name] = verdict
        if isinstance(verdict, str):
            raise LayoutError(verdict)
        return verdict

    def _judge(self, name: str, layout: CacheLayout, index_of: dict[str, int]) -> LayerVerdict:
        index = index_of.get(name)
        if index is None:
            return f"{name!r} is not a layer of Decode"
        source = self.layers.get(name)
        if source is None:
            return f"{name!r} is missing in Prefill's metadata"
        try:
            check_source(source, layout.layers[index])
        except LayoutError as error:
            return str(error)
        return index, LayerPair.of(source, layout.layers[index])

    def chunk(
        self, head: ReadyHead, layer_idx: int | None, shares: Callable[[ReadyHead], Shares], layout: CacheLayout
    ) -> Chunk:
        """The chunk of this message, parsed at its first layer. Raises WireError, RequestError.

        A legacy Prefill has no tokens, so a later request may have the very bytes of an earlier one (the same name and
        blocks again). What tells them apart is that a layer comes twice (``layer_idx``: Decode's position of it).
        """
        latest = self._latest
        if (
            latest is not None
            and self.peer is not None
            and latest.key[0] is head.requests_raw  # the splitter makes them one object
            and latest.key[1:] == (head.member, head.ratio)
        ):
            return latest
        key = (head.requests_raw, head.member, head.ratio)
        chunk = self._chunks.get(key)
        if self.peer is None and layer_idx is not None and chunk is not None and chunk.layers_read >> layer_idx & 1:
            chunk = None
        if chunk is None:
            requests = decode_read_requests(head.requests_raw)
            if self.peer is not None and any(request.token is None for request in requests):
                raise RequestError("an extended Prefill must send a token with every request")
            chunk = self._chunks[key] = Chunk(
                key, requests, shares(head), self, layout.has_indexer, (1 << len(layout.layers)) - 1
            )
        self._chunks.move_to_end(key)
        while len(self._chunks) > RECENT_CHUNKS:
            self._chunks.popitem(last=False)
        self._latest = chunk
        return chunk
