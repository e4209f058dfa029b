"""The store over a real offload manager attends to the same rows as the paged store, step after step."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from rd2h.errors import StateError
from rd2h.offload.config import SparseOffloadConfig
from rd2h.offload.manager import OffloadLayer, SparseKVOffloadManager
from rd2h.offload.pool import HostPoolAllocator
from rd2h.reference.batch import SparseBatch
from rd2h.reference.caches import PagedMain
from rd2h.reference.lives import RequestLives
from rd2h.reference.resident import ResidentMain
from rd2h.reference.selection import ABSENT

RANK, ROPE, HEADS, TOPK, BLOCK, BLOCKS, ROWS = 8, 4, 2, 8, 4, 96, 6
NAMES = ("layers.0", "layers.1", "layers.2")
SOURCES = {"layers.0": "layers.0", "layers.1": "layers.0", "layers.2": "layers.2"}


@dataclass
class Request:
    """A simulated request: its blocks, and how many tokens are computed."""

    name: str
    blocks: list[int] = field(default_factory=list)
    computed: int = 0


class TwoEngines:
    """One paged and one resident store per layer, driven by the same steps."""

    def __init__(self, manager: SparseKVOffloadManager, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.manager = manager
        self.lives = RequestLives()
        self.free = list(range(1, BLOCKS))
        self.requests: list[Request] = []
        self.paged, self.resident = {}, {}
        for name in NAMES:
            self.paged[name] = PagedMain()
            self.paged[name].bind(torch.zeros(BLOCKS, BLOCK, RANK), torch.zeros(BLOCKS, BLOCK, ROPE))
            self.resident[name] = ResidentMain(name, SOURCES[name])
            self.resident[name].bind(manager)
        self.count = 0

    def randoms(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=self.generator)

    def admit(self) -> None:
        self.count += 1
        request = Request(f"request-{self.count}")
        self.requests.append(request)
        self.lives.begin([request.name])

    def leave(self, index: int) -> None:
        request = self.requests.pop(index)
        self.lives.end([request.name])
        self.free += request.blocks

    def preempt(self, index: int) -> None:
        """Lose every block, keep the name, start over: what was resident must not count."""
        request = self.requests[index]
        self.free += request.blocks
        request.blocks, request.computed = [], 0
        self.lives.begin([request.name])

    def rewind(self, index: int, tokens: int) -> None:
        """Rejected speculation: the next step writes the last tokens again, with other values."""
        self.requests[index].computed = max(0, self.requests[index].computed - tokens)

    def step(self, scheduled: list[int]) -> int:
        """Compute ``scheduled[i]`` tokens of request i; returns how many differed (must be 0)."""
        batch = self._batch(scheduled)
        own: dict[str, torch.Tensor] = {}
        for name in NAMES:
            latents, ropes = self.randoms(batch.num_tokens, RANK).float(), self.randoms(batch.num_tokens, ROPE).float()
            queries = self.randoms(batch.num_tokens, HEADS, RANK), self.randoms(batch.num_tokens, HEADS, ROPE)
            if SOURCES[name] == name:
                own[name] = self._selection(batch)
            topk = own[SOURCES[name]]
            for store in (self.paged[name], self.resident[name]):
                store.append(batch, latents.double(), ropes.double())
            expected = self.paged[name].attend(batch, *queries, topk, 0.4)
            got = self.resident[name].attend(batch, *queries, topk, 0.4)
            if not torch.allclose(got, expected, rtol=1e-12, atol=1e-12):
                return int((got != expected).any(dim=(1, 2)).sum())
        return 0

    def _batch(self, scheduled: list[int]) -> SparseBatch:
        tables = torch.zeros(len(scheduled), BLOCKS, dtype=torch.int32)
        starts, slots, seq_lens = [0], [], []
        for row, (request, tokens) in enumerate(zip(self.requests, scheduled, strict=True)):
            total = request.computed + tokens
            while len(request.blocks) * BLOCK < total:
                request.blocks.append(self.free.pop(int(self.random.integers(len(self.free)))))
            tables[row, : len(request.blocks)] = torch.tensor(request.blocks, dtype=torch.int32)
            slots += [request.blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(request.computed, total)]
            starts.append(starts[-1] + tokens)
            seq_lens.append(total)
            request.computed = total
        keys = self.lives.keys([request.name for request in self.requests])
        return SparseBatch.of(torch.tensor(starts), torch.tensor(seq_lens), tables, torch.tensor(slots), keys)

    def _selection(self, batch: SparseBatch) -> torch.Tensor:
        """Positions with locality: mostly recent and low ones, as attention prefers them."""
        rows = []
        for position in batch.positions.tolist():
            wanted = {position, *range(min(3, position + 1))}
            wanted |= set(self.random.integers(0, position + 1, TOPK).tolist())
            chosen = sorted(wanted)[:TOPK]
            rows.append(chosen + [ABSENT] * (TOPK - len(chosen)))
        return torch.tensor(rows)


@pytest.fixture(params=[1, 2, 4], ids=lambda factor: f"buffer={factor}xtopk")
def manager(request: pytest.FixtureRequest) -> Iterator[SparseKVOffloadManager]:
    made = SparseKVOffloadManager(
        SparseOffloadConfig(enabled=True, topk_buffer_size=request.param * TOPK, dram_size_per_dp_gib=1),
        [OffloadLayer(name, RANK, ROPE) for name in NAMES],
        torch.float32,
        BLOCKS,
        BLOCK,
        ROWS,
        TOPK,
        0,
        1,
        HostPoolAllocator(),
        lambda: None,
        register=False,
    )
    yield made
    made.close()


@pytest.mark.parametrize("seed", range(3))
def test_stores_agree_whatever_comes_and_goes(manager: SparseKVOffloadManager, seed: int) -> None:
    engines = TwoEngines(manager, seed)
    prefills, decodes = 0, 0
    for _ in range(300):
        event = engines.random.random()
        index = int(engines.random.integers(len(engines.requests))) if engines.requests else 0
        if len(engines.requests) < 2 or (event < 0.1 and len(engines.requests) < 5):
            engines.admit()
        elif event < 0.15:
            engines.leave(index)
        elif event < 0.2:
            engines.preempt(index)
        elif event < 0.25:
            engines.rewind(index, 2)
        elif event < 0.3:
            engines.requests.reverse()
        for at in reversed([i for i, request in enumerate(engines.requests) if request.computed > 60]):
            engines.leave(at)
        # A new request brings a prompt, which may be longer than the hot buffer has rows.
        scheduled = [1 if request.computed else int(engines.random.integers(1, 12)) for request in engines.requests]
        prefills, decodes = prefills + (sum(scheduled) > ROWS), decodes + (sum(scheduled) <= ROWS)
        if scheduled:
            assert engines.step(scheduled) == 0
    assert prefills > 10
    assert decodes > 50
    counted = manager.stats()
    assert counted["hits"] > 0
    assert counted["misses"] > 0
    assert counted["evictions"] > 0


def test_a_request_that_keeps_its_key_over_a_preemption_would_read_stale_rows(manager: SparseKVOffloadManager) -> None:
    """The negative control of the test above: without a new life per admission the stores come apart."""
    engines = TwoEngines(manager, 7)
    engines.admit()
    engines.step([5])
    for _ in range(6):
        engines.step([1])
    begin, engines.lives.begin = engines.lives.begin, lambda request_ids: None  # type: ignore[method-assign]
    engines.preempt(0)
    engines.lives.begin = begin  # type: ignore[method-assign]
    # Not through the hot buffer: residents of the old life stay where they are.
    engines.requests[0].computed = 0
    batch = engines._batch([4])
    for name in NAMES:
        rows = engines.randoms(4, RANK).float(), engines.randoms(4, ROPE).float()
        for store in (engines.paged[name], engines.resident[name]):
            store.append(batch, rows[0].double(), rows[1].double())
    assert engines.step([1]) > 0


def test_unknown_requests_and_missing_keys_are_errors(manager: SparseKVOffloadManager) -> None:
    with pytest.raises(StateError, match="never began"):
        RequestLives().keys(["nobody"])
    with pytest.raises(StateError, match="no offload manager"):
        ResidentMain("layers.0", "layers.0").append(
            SparseBatch.of(
                torch.tensor([0, 1]), torch.tensor([1]), torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0])
            ),
            torch.zeros(1, RANK),
            torch.zeros(1, ROPE),
        )
    engines = TwoEngines(manager, 1)
    engines.admit()
    batch = engines._batch([1])
    nameless = SparseBatch(batch.query_starts, batch.seq_lens, batch.block_tables, batch.slots, batch.token_requests)
    queries = engines.randoms(1, HEADS, RANK), engines.randoms(1, HEADS, ROPE)
    with pytest.raises(StateError, match="without request keys"):
        engines.resident["layers.0"].attend(nameless, *queries, torch.full((1, TOPK), ABSENT), 0.4)
