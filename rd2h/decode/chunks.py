"""A chunk as Decode sees it: the same read requests for every layer, parsed, resolved and planned once.

Prefill repeats a chunk's block lists in every layer's message. The undecoded bytes are the key under which the first
layer's work is kept, so the other layers cost a byte comparison. Pure state.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rd2h.children import Child, ChildState, ChildTable
from rd2h.errors import RequestError
from rd2h.ledger import BlockRange
from rd2h.plan import ChunkPlan, coalesce
from rd2h.topology import share_of
from rd2h.wire import TOKEN_BYTES, BlockIds, ReadRequest, Refusal


@dataclass(frozen=True, slots=True)
class Shares:
    """Which part of a chunk this rank pulls from this contributor.

    ``split_main`` is true for a pool that all Decode ranks share; false where every rank keeps all of main.
    """

    d_rank: int
    d_tp: int
    split_main: bool
    member: int
    ratio: int

    def main(self, start: int, count: int) -> range:
        """Positions of main within a chunk: only contributor 0 delivers main."""
        if self.member != 0:
            return range(0)
        return share_of(start, count, self.d_tp, self.d_rank) if self.split_main else range(count)

    def indexer(self, start: int, count: int) -> range:
        """Positions of the indexer (and scale) within a chunk."""
        return share_of(start, count, self.ratio, self.member)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """One request of a chunk, resolved to its child."""

    child: Child
    request: ReadRequest
    main: BlockRange
    indexer: BlockRange

    @property
    def token(self) -> bytes:
        """Token of the child."""
        return self.child.spec.token


ChunkKey = tuple[bytes, int, int]
"""Undecoded read requests, member, ratio."""
NO_TOKEN = bytes(TOKEN_BYTES)
Resolve = Callable[[ReadRequest], bytes | None]


@dataclass(slots=True, eq=False)
class Chunk:
    """One chunk of one connection and which layers of it have been read."""

    key: ChunkKey
    requests: Sequence[ReadRequest]
    shares: Shares
    source: object
    has_indexer: bool
    all_layers: int
    """Bit mask with one bit for each of Decode's layers."""
    layers_read: int = 0
    pieces: tuple[Piece, ...] = ()
    refused: tuple[Refusal, ...] = ()
    unknown: tuple[bytes | None, ...] = ()
    """Requests that this rank has never seen (None: no token): their destination may still come."""
    started: bool = False
    """Set once a layer was handled."""
    plan: ChunkPlan | None = None
    tokens: frozenset[bytes] = frozenset()
    """Tokens of ``pieces``."""
    _epoch: int = -1
    _recorded: bool = False

    def resolve(self, table: ChildTable, resolve: Resolve) -> None:
        """Match requests to pullable children, refuse the others one by one, and plan the reads.

        Cheap when nothing changed in the table since the last call.
        """
        if self._epoch == table.epoch:
            return
        # Once a layer has been handled the set of children may only shrink: one that joined later would lack layers,
        # and a name that now means another child must not bring that one in.
        candidates: list[tuple[ReadRequest, bytes | None]]
        if self.started:
            candidates = [(piece.request, piece.token) for piece in self.pieces]
        else:
            candidates = [(request, resolve(request)) for request in self.requests]
        pieces: list[Piece] = []
        refused: list[Refusal] = list(self.refused) if self.started else []
        unknown: list[bytes | None] = []
        for request, token in candidates:
            child = table.get(token) if token is not None else None
            if token is None or child is None:
                gone = table.why_gone(token) if token is not None else None
                if gone is None:
                    unknown.append(token)
                refused.append(Refusal(token or NO_TOKEN, gone or "no such request is waiting here"))
                continue
            try:
                pieces.append(self._piece(child, request))
            except RequestError as error:
                refused.append(Refusal(token, str(error)))
        kept = tuple(pieces)
        if self.plan is None or len(kept) != len(self.pieces) or not self.started:
            self.plan = self._make_plan(kept)
        self.pieces, self.refused, self.unknown = kept, tuple(refused), tuple(unknown)
        self.tokens = frozenset(piece.token for piece in kept)
        self._epoch = table.epoch

    def layer_read(self, layer_idx: int) -> list[tuple[bytes, str]]:
        """A layer of this chunk has been read; returns the children whose coverage has a hole, with the reason."""
        self.layers_read |= 1 << layer_idx
        if self.layers_read != self.all_layers or self._recorded:
            return []
        self._recorded = True
        holes = []
        for piece in self.pieces:
            ledger = piece.child.ledger
            if ledger is None:
                raise RequestError("a piece was not admitted")
            try:
                ledger.advance(self.shares.member, piece.main, piece.indexer)
            except RequestError as error:
                holes.append((piece.token, str(error)))
        return holes

    def _piece(self, child: Child, request: ReadRequest) -> Piece:
        if child.state is not ChildState.PULLING:
            raise RequestError(child.reason or "request is ending")
        spec = child.spec
        main = _within("main", request.main_start, request.main_blocks, spec.main_range)
        indexer = BlockRange(0, 0)
        if self.has_indexer:
            indexer = _within("indexer", request.indexer_start, request.indexer_blocks, spec.indexer_range)
        child.admit(self.source, self.shares.member, self.shares.ratio, self.has_indexer)
        return Piece(child, request, main, indexer)

    def _make_plan(self, pieces: Sequence[Piece]) -> ChunkPlan:
        main_source, main_local, indexer_source, indexer_local = [], [], [], []
        for piece in pieces:
            spec, request = piece.child.spec, piece.request
            part = self.shares.main(piece.main.start, piece.main.stop - piece.main.start)
            main_source.append(request.main_blocks[part.start : part.stop])
            offset = piece.main.start - spec.main_start
            main_local.append(spec.main_blocks[offset + part.start : offset + part.stop])
            if self.has_indexer:
                part = self.shares.indexer(piece.indexer.start, piece.indexer.stop - piece.indexer.start)
                indexer_source.append(request.indexer_blocks[part.start : part.stop])
                offset = piece.indexer.start - spec.indexer_start
                indexer_local.append(spec.indexer_blocks[offset + part.start : offset + part.stop])
        main = coalesce(_joined(main_source), _joined(main_local))
        indexer = coalesce(_joined(indexer_source), _joined(indexer_local))
        # Most often both are read by the same runs; being one object tells the plan so.
        return ChunkPlan(main, main if main == indexer else indexer)


def _within(component: str, start: int, blocks: BlockIds, allowed: BlockRange) -> BlockRange:
    chunk = BlockRange(start, start + len(blocks))
    if chunk.start < chunk.stop and not (allowed.start <= chunk.start and chunk.stop <= allowed.stop):
        raise RequestError(
            f"{component} blocks {chunk.start}..{chunk.stop} lie outside destination {allowed.start}..{allowed.stop}"
        )
    return chunk


def _joined(parts: Sequence[BlockIds]) -> BlockIds:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
