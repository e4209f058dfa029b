"""Coverage ledger: proof that every contributor delivered every layer over the whole block range of a child.

"The last layer said done" is no proof. A contributor's chunks arrive in order on one connection, so coverage of a
component is a frontier; a chunk that begins beyond it means that a message was lost, and the child fails.
"""

from dataclasses import dataclass, field

from rd2h.errors import RequestError


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Block positions ``start`` (inclusive) to ``stop`` (exclusive) of a prompt."""

    start: int
    stop: int


@dataclass(slots=True)
class CoverageLedger:
    """Coverage of one child by ``contributors`` Prefill ranks over its main and indexer ranges.

    ``indexer`` is None for a model without an indexer cache.
    """

    main: BlockRange
    indexer: BlockRange | None
    contributors: int
    _main_frontier: list[int] = field(init=False)
    _indexer_frontier: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._main_frontier = [self.main.start] * self.contributors
        self._indexer_frontier = [self.indexer.start if self.indexer else 0] * self.contributors

    def advance(self, member: int, main: BlockRange, indexer: BlockRange) -> None:
        """Record that ``member`` delivered these blocks *on every layer*. Duplicates change nothing.

        Raises RequestError when blocks between the frontier and the chunk are missing.
        """
        self._main_frontier[member] = _advance("main", self._main_frontier[member], main)
        if self.indexer is not None:
            self._indexer_frontier[member] = _advance("indexer", self._indexer_frontier[member], indexer)

    def complete(self, member: int) -> bool:
        """Whether ``member`` has delivered its whole range."""
        if self._main_frontier[member] < self.main.stop:
            return False
        return self.indexer is None or self._indexer_frontier[member] >= self.indexer.stop

    def all_complete(self) -> bool:
        """Whether every contributor has delivered its whole range."""
        return all(self.complete(member) for member in range(self.contributors))

    def missing(self, member: int) -> str:
        """What ``member`` still owes, in words."""
        text = f"contributor {member}: main blocks {self._main_frontier[member]}..{self.main.stop}"
        if self.indexer is not None:
            text += f", indexer blocks {self._indexer_frontier[member]}..{self.indexer.stop}"
        return text


def _advance(component: str, frontier: int, chunk: BlockRange) -> int:
    if chunk.start >= chunk.stop:
        return frontier
    if chunk.start > frontier:
        raise RequestError(f"{component} blocks {frontier}..{chunk.start} never arrived")
    return max(frontier, chunk.stop)
