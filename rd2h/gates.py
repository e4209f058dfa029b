"""Completion gates of physical storage slots on Prefill.

Before bytes of a slot are overwritten, every Decode endpoint that was told "ready" for them has acknowledged. A gate
entry remembers (endpoint, sequence, block ids) and is opened only by the acknowledgement with that endpoint and that
sequence number; anything stale, duplicate or foreign changes nothing. A writer that knows which blocks it overwrites
waits only for entries with those blocks. Pure state: the publisher adds the lock and the waiting.
"""

from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

Endpoint = Hashable


class Component(Enum):
    """Main and indexer storage are gated apart."""

    MAIN = "main"
    INDEXER = "indexer"


class Slot(NamedTuple):
    """One physical buffer."""

    component: Component
    number: int


@dataclass(frozen=True, slots=True, eq=False)
class ChunkBlocks:
    """Prefill block ids of one chunk for one endpoint; shared by the entries of all its layers."""

    main: frozenset[int]
    indexer: frozenset[int]

    def of(self, component: Component) -> frozenset[int]:
        """Block ids in the component's own id space."""
        return self.main if component is Component.MAIN else self.indexer


@dataclass(frozen=True, slots=True, eq=False)
class GateEntry:
    """One ready message that is not yet acknowledged."""

    endpoint: Endpoint
    seq: int
    layer_idx: int
    slots: tuple[Slot, ...]
    blocks: ChunkBlocks


@dataclass(frozen=True, slots=True)
class Writes:
    """Blocks that a forward step is about to overwrite; None where they are not known (then all count)."""

    main: Collection[int] | None
    indexer: Collection[int] | None

    def touches(self, blocks: ChunkBlocks, component: Component) -> bool:
        """Whether an entry with ``blocks`` guards any of these writes."""
        written = self.main if component is Component.MAIN else self.indexer
        return written is None or not blocks.of(component).isdisjoint(written)


ALL_BLOCKS = Writes(None, None)


@dataclass(slots=True)
class SlotGates:
    """All unacknowledged ready messages, by (endpoint, sequence) and by slot."""

    _entries: dict[tuple[Endpoint, int], GateEntry] = field(default_factory=dict)
    _by_slot: dict[Slot, dict[tuple[Endpoint, int], GateEntry]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._entries)

    def close(self, entry: GateEntry) -> None:
        """A ready message will be sent: its slots may not be overwritten from now on."""
        key = (entry.endpoint, entry.seq)
        if key in self._entries:
            raise ValueError(f"sequence {entry.seq} is used twice for {entry.endpoint!r}")
        self._entries[key] = entry
        for slot in entry.slots:
            self._by_slot.setdefault(slot, {})[key] = entry

    def acknowledge(self, endpoint: Endpoint, seq: int, layer_idx: int) -> GateEntry | None:
        """Open what this acknowledgement waits for; None when it belongs to nothing (stale, duplicate, foreign)."""
        entry = self._entries.get((endpoint, seq))
        if entry is None or entry.layer_idx != layer_idx:
            return None
        self._remove(entry)
        return entry

    def give_up(self, endpoint: Endpoint) -> list[GateEntry]:
        """Open every entry of an endpoint that can no longer read."""
        return self.give_up_where(endpoint, None)

    def give_up_where(self, endpoint: Endpoint, seqs: Iterable[int] | None) -> list[GateEntry]:
        """Open the entries of ``endpoint`` with these sequence numbers (None: all)."""
        if seqs is None:
            gone = [entry for (owner, _), entry in self._entries.items() if owner == endpoint]
        else:
            found = (self._entries.get((endpoint, seq)) for seq in dict.fromkeys(seqs))
            gone = [entry for entry in found if entry is not None]
        for entry in gone:
            self._remove(entry)
        return gone

    def outstanding(self, endpoint: Endpoint) -> int:
        """Unacknowledged messages of an endpoint."""
        return sum(1 for owner, _ in self._entries if owner == endpoint)

    def blocking(self, slots: Iterable[Slot] | None, writes: Writes) -> list[GateEntry]:
        """Entries that a write into ``slots`` (None: any slot) must wait for."""
        return list(self._blocking(slots, writes))

    def blocked(self, slots: Iterable[Slot] | None, writes: Writes) -> bool:
        """Whether a write into ``slots`` (None: any slot) must wait; looks no further than the first reason."""
        return next(self._blocking(slots, writes), None) is not None

    def _blocking(self, slots: Iterable[Slot] | None, writes: Writes) -> Iterator[GateEntry]:
        if not self._entries:
            return
        verdicts: dict[tuple[int, Component], bool] = {}
        seen: set[tuple[Endpoint, int]] = set()
        for slot in list(self._by_slot) if slots is None else slots:
            for key, entry in self._by_slot.get(slot, {}).items():
                verdict_key = (id(entry.blocks), slot.component)
                touched = verdicts.get(verdict_key)
                if touched is None:
                    touched = verdicts[verdict_key] = writes.touches(entry.blocks, slot.component)
                if touched and key not in seen:
                    seen.add(key)
                    yield entry

    def _remove(self, entry: GateEntry) -> None:
        key = (entry.endpoint, entry.seq)
        del self._entries[key]
        for slot in entry.slots:
            members = self._by_slot[slot]
            del members[key]
            if not members:
                del self._by_slot[slot]
