"""Which token of which request lies in which slot of the hot buffer: look-up, eviction and the plan of the copies.

Pure NumPy, no clock, no thread. A row of the hot buffer holds ``capacity`` tokens of one request. Per row there is the
list of (token, slot) from least to most recently used; a look-up orders it anew: free slots, residents that were not
asked for (their order kept), misses (in order of the question), hits (their order kept). Slots for misses are taken
from the front, so that a free slot is used before anything is evicted, and what this step wants is never evicted.

What makes a resident valid:

* the row's request key is the same. A key names one life of a request: preempted and resumed is another life.
* the position is below the stable prefix, now and at the row's last look-up. What was fetched from above it served that
  step only: it may have been rewritten since, in a step that this row had no part in. (The price is that the newest
  token is fetched twice.)
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rd2h.errors import ConfigError, StateError
from rd2h.offload.compiled import Kernel, Lookup

MAX_POSITIONS = (1 << 31) - 1
MAX_WORKSPACE_ENTRIES = 1 << 22
"""Bound of the NumPy form's position table; more rows are planned in turns."""
BAD_POSITION = 1
"""The kernel's word for a position beyond the block table; its other fault is a block outside the pool."""
PADDING = 0
"""Request key of a padded row."""

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]


def request_key(request_id: str, life: int = 0) -> int:
    """64-bit identity of one life of a request; never ``PADDING``. Count ``life`` up when it is resumed."""
    digest = hashlib.blake2b(f"{life}:{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of a hot buffer and of the pool behind it."""

    rows: int
    capacity: int
    topk: int
    block_size: int
    num_blocks: int

    def __post_init__(self) -> None:
        if min(self.rows, self.capacity, self.topk, self.block_size, self.num_blocks) < 1:
            raise ConfigError(f"every size of {self} must be positive")
        if self.capacity < self.topk:
            raise ConfigError.bad_value("topk_buffer_size", self.capacity, f"at least index_topk={self.topk}")
        if self.capacity % self.block_size:
            raise ConfigError.bad_value("topk_buffer_size", self.capacity, f"a multiple of {self.block_size}")


@dataclass(frozen=True, slots=True)
class Question:
    """What the rows of one step ask for."""

    topk: Int64s
    """[rows, topk] logical positions; negative: absent. Duplicates share a slot."""
    keys: UInt64s
    """[rows] request keys; ``PADDING`` rows change nothing and get no slots."""
    stable_prefix: Int64s
    """[rows] positions below it are final."""
    block_tables: Int32s
    """[rows, blocks] pool block of each block of positions."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Slots of everything asked for, and the rows to copy before they may be read."""

    slots: Int32s
    """[rows, topk] slot in the row's hot buffer, -1 for absent entries and padded rows."""
    sources: Int64s
    """[misses] row of the pool: block * block_size + offset."""
    targets: Int64s
    """[misses] row of the hot buffer: row * capacity + slot."""
    hits: int
    evictions: int

    @property
    def misses(self) -> int:
        """Rows to copy."""
        return len(self.sources)


class Workspace:
    """Scratch memory of a look-up, shared by all layers; grows with the longest block table."""

    def __init__(self, geometry: Geometry) -> None:
        self.scratch = np.empty((3 * geometry.capacity + geometry.topk, 2), np.int32)
        self.slot_of = np.zeros(0, np.int32)
        self.wanted = np.zeros(0, np.uint64)
        self.marks = np.zeros((0, 0), np.int32)
        self.sources = np.empty(geometry.rows * geometry.topk, np.int64)
        self.targets = np.empty(geometry.rows * geometry.topk, np.int64)

    def for_kernel(self, positions: int) -> None:
        """Room for ``positions``."""
        if len(self.slot_of) < positions:
            self.slot_of = np.zeros(positions, np.int32)
            self.wanted = np.zeros(positions // 64 + 1, np.uint64)

    def for_numpy(self, rows: int, columns: int) -> Int32s:
        """A zeroed table of at least ``columns`` for at least one and at most ``rows`` rows; it never gets narrower, as
        residents of longer block tables are marked in it too."""
        columns = max(columns, self.marks.shape[1])
        turn = max(1, min(rows, MAX_WORKSPACE_ENTRIES // columns))
        if self.marks.shape[0] < turn or self.marks.shape[1] < columns:
            self.marks = np.zeros((turn, columns), np.int32)
        return self.marks[:turn]


class ResidencyTable:
    """The residents of one hot buffer (or of several whose layers share their selection). One thread at a time."""

    def __init__(self, geometry: Geometry, workspace: Workspace | None = None, kernel: Kernel | None = None) -> None:
        self.geometry = geometry
        self._workspace = workspace if workspace is not None else Workspace(geometry)
        self._kernel = kernel
        rows, capacity = geometry.rows, geometry.capacity
        self._entries = np.empty((rows, capacity, 2), np.int32)
        self._entries[:] = np.stack([np.full(capacity, -1), np.arange(capacity)], axis=1)
        self._last_keys = np.zeros(rows, np.uint64)
        self._last_prefix = np.zeros(rows, np.int64)

    def clear(self) -> None:
        """Forget every resident, for example because a copy failed."""
        self._last_keys[:] = PADDING

    def residents(self, row: int) -> list[tuple[int, int]]:
        """(token, slot) of a row from least to most recently used; token -1 is a free slot."""
        return [(token, slot) for token, slot in self._entries[row].tolist()]

    def plan(self, question: Question) -> Plan:
        """Look up, evict, and plan the copies. The rows of the plan count as resident from now on.

        Raises StateError for a position beyond the block table or a block outside the pool; then nothing is resident.
        """
        self._check(question)
        plan = None
        try:
            plan = self._plan_numpy(question) if self._kernel is None else self._plan_compiled(self._kernel, question)
        finally:
            if plan is None:
                self.clear()
        return plan

    def whole_selection(self, question: Question, plan: Plan) -> tuple[Int64s, Int64s]:
        """(targets, sources) of every distinct entry of a plan, hits included; ``question`` is the plan's own."""
        rows, columns = np.nonzero(plan.slots >= 0)
        targets = rows * self.geometry.capacity + plan.slots[rows, columns]
        targets, first = np.unique(targets, return_index=True)
        rows, tokens = rows[first], question.topk[rows[first], columns[first]]
        blocks = question.block_tables[rows, tokens // self.geometry.block_size].astype(np.int64)
        return targets, blocks * self.geometry.block_size + tokens % self.geometry.block_size

    def _check(self, question: Question) -> None:
        geometry, rows = self.geometry, len(question.keys)
        shapes = (question.topk.shape, question.stable_prefix.shape, question.block_tables.shape[:1])
        if shapes != ((rows, geometry.topk), (rows,), (rows,)) or question.block_tables.ndim != 2:
            raise StateError(f"topk, stable_prefix and block_tables have shapes {shapes} for {rows} rows of {geometry}")
        if rows > geometry.rows:
            raise StateError(f"{rows} rows asked, the hot buffer has {geometry.rows}")
        if question.block_tables.shape[1] * geometry.block_size > MAX_POSITIONS:
            raise StateError(
                f"block tables of {question.block_tables.shape[1]} blocks exceed {MAX_POSITIONS} positions"
            )

    # --- compiled ---

    def _plan_compiled(self, kernel: Kernel, question: Question) -> Plan:
        geometry, work, rows = self.geometry, self._workspace, len(question.keys)
        max_blocks = question.block_tables.shape[1]
        work.for_kernel(max_blocks * geometry.block_size)
        slots, counts = np.empty((rows, geometry.topk), np.int32), np.zeros(3, np.int64)
        inputs = (
            np.ascontiguousarray(question.topk, np.int64),
            np.ascontiguousarray(question.keys, np.uint64),
            np.ascontiguousarray(question.stable_prefix, np.int64),
            np.ascontiguousarray(question.block_tables, np.int32),
        )
        state = (self._entries, self._last_keys, self._last_prefix)
        scratch = (work.wanted, work.slot_of, work.scratch)
        outputs = (slots, work.sources, work.targets, counts)
        lookup = Lookup(
            rows,
            geometry.topk,
            geometry.capacity,
            *(array.ctypes.data for array in inputs),
            max_blocks,
            geometry.block_size,
            geometry.num_blocks,
            *(array.ctypes.data for array in (*state, *scratch, *outputs)),
        )
        status = kernel.plan(lookup)
        if status:
            raise _fault(geometry, max_blocks, status == BAD_POSITION, int(counts[0]), int(counts[1]))
        misses = int(counts[0])
        sources, targets = work.sources[:misses].copy(), work.targets[:misses].copy()
        return Plan(slots, sources, targets, int(counts[1]), int(counts[2]))

    # --- NumPy ---

    def _plan_numpy(self, question: Question) -> Plan:
        active = np.flatnonzero(question.keys != PADDING)
        slots = np.full(question.topk.shape, -1, np.int32)
        positions = question.block_tables.shape[1] * self.geometry.block_size
        marks = self._workspace.for_numpy(len(active), positions + 1)
        turns = [
            self._plan_turn(question, active[start : start + len(marks)], marks, slots)
            for start in range(0, len(active), len(marks))
        ]
        return Plan(
            slots,
            np.concatenate([np.zeros(0, np.int64), *(turn.sources for turn in turns)]),
            np.concatenate([np.zeros(0, np.int64), *(turn.targets for turn in turns)]),
            sum(turn.hits for turn in turns),
            sum(turn.evictions for turn in turns),
        )

    def _plan_turn(self, question: Question, rows: Int64s, marks: Int32s, all_slots: Int32s) -> Plan:
        """Plans ``rows``, which ``marks`` has room for; writes their part of ``all_slots``."""
        geometry, capacity = self.geometry, self.geometry.capacity
        topk, max_blocks = question.topk[rows], question.block_tables.shape[1]
        self._check_positions(topk, rows, max_blocks)
        entries, valid = self._take_rows(question, rows)
        tokens, slots = entries[..., 0], np.ascontiguousarray(entries[..., 1])

        # marks: 0 not asked, -1 asked, slot + 1 asked and resident. All zero again at the end. The last column of each
        # row stands for everything absent, so that no array needs to be compressed.
        marks = marks[: len(rows)]
        absent, row_start = marks.shape[1] - 1, np.arange(len(rows))[:, None] * marks.shape[1]
        table = marks.reshape(-1)
        asked = np.where(topk >= 0, topk, absent) + row_start
        held = np.where(valid, tokens, absent) + row_start
        table[asked] = -1
        marks[:, absent] = 0
        hit = table[held] != 0
        hits = np.flatnonzero(hit)
        table[held.reshape(-1)[hits]] = slots.reshape(-1)[hits] + 1
        missing = asked.reshape(-1)[np.flatnonzero(table[asked] < 0)]
        # Of equal entries the first one counts: written backwards, the first one is written last.
        numbers = -2 - np.arange(len(missing), dtype=np.int32)
        table[missing[::-1]] = numbers[::-1]
        new = missing[table[missing] == numbers]
        new_row, new_token = np.divmod(new, marks.shape[1])
        given = np.bincount(new_row, minlength=len(rows))
        column = np.arange(len(new)) - (np.cumsum(given) - given)[new_row]

        # Front to back: free, residents not asked for, hits. Misses take the front and move in before the hits.
        flat_start = np.arange(len(rows))[:, None] * capacity
        order = np.argsort(valid.view(np.uint8) + hit.view(np.uint8), axis=1, kind="stable") + flat_start
        taken = order[new_row, column]
        tokens[~valid] = -1
        entries.reshape(-1, 2)[taken, 0] = new_token
        new_slot = slots.reshape(-1)[taken]
        table[new] = new_slot + 1
        all_slots[rows] = table[asked] - 1
        table[asked] = 0
        columns, movable = np.arange(capacity), (capacity - np.count_nonzero(hit, axis=1))[:, None]
        turned = columns + given[:, None]
        turned = np.where(columns < movable, np.where(turned < movable, turned, turned - movable), columns)
        order = order.reshape(-1)[turned + flat_start]
        self._entries[rows] = entries.reshape(-1, 2)[order]

        blocks = question.block_tables[rows[new_row], new_token // geometry.block_size].astype(np.int64)
        outside = np.flatnonzero((blocks < 0) | (blocks >= geometry.num_blocks))
        if len(outside):
            raise _fault(geometry, max_blocks, False, int(rows[new_row[outside[0]]]), int(blocks[outside[0]]))
        free = capacity - np.count_nonzero(valid, axis=1)
        return Plan(
            all_slots,
            blocks * geometry.block_size + new_token % geometry.block_size,
            rows[new_row] * capacity + new_slot,
            int(np.count_nonzero(topk >= 0)) - len(new),
            int(np.maximum(given - free, 0).sum()),
        )

    def _take_rows(self, question: Question, rows: Int64s) -> tuple[Int32s, npt.NDArray[np.bool_]]:
        """(token, slot) of ``rows`` in order of use, and which of them are valid residents; notes the look-up."""
        keys, prefix = question.keys[rows], question.stable_prefix[rows]
        entries = self._entries[rows]
        limit = np.minimum(prefix, self._last_prefix[rows])
        changed = self._last_keys[rows] != keys
        limit[changed] = 0
        entries[changed, :, 1] = np.arange(self.geometry.capacity, dtype=np.int32)
        self._last_keys[rows], self._last_prefix[rows] = keys, prefix
        tokens = entries[..., 0]
        return entries, (tokens >= 0) & (tokens < limit[:, None])

    def _check_positions(self, topk: Int64s, rows: Int64s, max_blocks: int) -> None:
        beyond = np.argwhere(topk >= max_blocks * self.geometry.block_size)
        if len(beyond):
            row, column = beyond[0]
            raise _fault(self.geometry, max_blocks, True, int(rows[row]), int(topk[row, column]))


def _fault(geometry: Geometry, max_blocks: int, position: bool, row: int, value: int) -> StateError:
    if position:
        return StateError(f"row {row}: position {value} is beyond its {max_blocks * geometry.block_size} positions")
    return StateError(f"row {row}: pool block {value} is not one of the pool's {geometry.num_blocks}")
