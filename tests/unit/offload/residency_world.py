"""Requests that come, grow, speculate and go, with the truth about every stored row beside the tables under test.

A stored row is the triple (request, position, version): each write of a position gives it a new version. After every
look-up the planned copies are carried out on a model of the hot buffer; then every entry asked for must be the newest.
"""

import random
from dataclasses import dataclass

import numpy as np
from residency_reference import ReferenceTable

from rd2h.offload.kernel import load_kernel
from rd2h.offload.residency import Geometry, Question, ResidencyTable, Workspace, request_key

BLOCK = 4
BLOCKS_PER_REQUEST = 8
POSITIONS = BLOCK * BLOCKS_PER_REQUEST


@dataclass
class Request:
    name: str
    life: int
    blocks: list
    computed: int
    """Positions whose rows are final: the stable prefix of the next step."""

    @property
    def key(self):
        return request_key(self.name, self.life)


class World:
    def __init__(self, rows=4, topk=6, capacity=12, requests=5):
        self.geometry = Geometry(rows, capacity, topk, BLOCK, requests * BLOCKS_PER_REQUEST)
        kernel = load_kernel()
        assert kernel is not None, "these tests compare the compiled kernel, but there is no C compiler"
        self.reference = ReferenceTable(rows, capacity, BLOCK)
        self.tables = [
            ResidencyTable(self.geometry, Workspace(self.geometry)),
            ResidencyTable(self.geometry, Workspace(self.geometry), kernel),
        ]
        self.free_blocks = list(range(self.geometry.num_blocks))
        self.requests = []
        self.names = 0
        self.pool = {}
        self.hot = {}
        self.versions = 0
        self.steps = self.hits = self.evictions = self.duplicates = self.rewrites = 0

    # --- what happens to requests ---

    @property
    def can_join(self):
        return len(self.free_blocks) >= BLOCKS_PER_REQUEST

    def join(self, computed, rng):
        """A request whose first ``computed`` positions have been pulled."""
        rng.shuffle(self.free_blocks)
        blocks, self.free_blocks = self.free_blocks[:BLOCKS_PER_REQUEST], self.free_blocks[BLOCKS_PER_REQUEST:]
        self.names += 1
        request = Request(f"request-{self.names}", 0, blocks, computed)
        self._write(request, range(computed))
        self.requests.append(request)

    def leave(self, request):
        self.requests.remove(request)
        self.free_blocks += request.blocks

    def resume(self, request, rng):
        """Preempted and resumed: other blocks, everything stored anew, another life."""
        self.free_blocks += request.blocks
        rng.shuffle(self.free_blocks)
        request.blocks, self.free_blocks = self.free_blocks[:BLOCKS_PER_REQUEST], self.free_blocks[BLOCKS_PER_REQUEST:]
        request.life += 1
        self._write(request, range(request.computed))

    def _write(self, request, positions):
        for position in positions:
            self.versions += 1
            self.rewrites += self._row(request, position) in self.pool
            self.pool[self._row(request, position)] = (request.name, position, self.versions)

    @staticmethod
    def _row(request, position):
        return request.blocks[position // BLOCK] * BLOCK + position % BLOCK

    # --- steps ---

    def step(self, running, width, accepted, rng, look_up=True):
        """One forward of ``running`` with ``width`` tokens each, of which ``accepted`` turn out right."""
        running = [request for request in running if request.computed + width <= POSITIONS]
        for request in running:
            self._write(request, range(request.computed, request.computed + width))
        if look_up:
            self.look_up(
                [(request, request.computed + offset + 1) for request in running for offset in range(width)], rng
            )
        for request in running:
            request.computed += min(accepted, width)

    def look_up(self, rows, rng):
        """Rows of (request or None for padding, positions it may see), at most as many as the hot buffer has."""
        geometry = self.geometry
        rows = rows[: geometry.rows]
        while len(rows) < geometry.rows and rng.random() < 0.5:
            rows.insert(rng.randrange(len(rows) + 1), (None, POSITIONS))
        topk = [self._choose(seen, rng) for _, seen in rows]
        keys = [0 if request is None else request.key for request, _ in rows]
        prefixes = [0 if request is None else request.computed for request, _ in rows]
        blocks = [[-7] * BLOCKS_PER_REQUEST if request is None else request.blocks for request, _ in rows]
        expected = self.reference.plan(topk, keys, prefixes, blocks)
        question = Question(
            np.array(topk, np.int64).reshape(len(rows), geometry.topk),
            np.array(keys, np.uint64),
            np.array(prefixes, np.int64),
            np.array(blocks, np.int32).reshape(len(rows), BLOCKS_PER_REQUEST),
        )
        for table in self.tables:
            plan = table.plan(question)
            assert plan.slots.tolist() == expected.slots
            assert plan.sources.tolist() == expected.sources
            assert plan.targets.tolist() == expected.targets
            assert (plan.hits, plan.evictions) == (expected.hits, expected.evictions)
            for row in range(geometry.rows):
                if self.reference.rows[row].key:
                    assert table.residents(row) == self.reference.residents(row)
        for source, target in zip(expected.sources, expected.targets, strict=True):
            self.hot[target] = self.pool[source]
        self._check_truth(rows, topk, expected)
        self.steps += 1
        self.hits += expected.hits
        self.evictions += expected.evictions

    def _choose(self, seen, rng):
        """Positions below ``seen`` with gaps and duplicates, recent ones more often."""
        choice = []
        for _ in range(self.geometry.topk):
            dice = rng.random()
            if dice < 0.15 or not seen:
                choice.append(-rng.randint(1, 3))
            elif dice < 0.3 and choice:
                choice.append(rng.choice(choice))
            elif dice < 0.6:
                choice.append(max(0, seen - 1 - rng.randrange(3)))
            else:
                choice.append(rng.randrange(seen))
        self.duplicates += len(choice) - len(set(choice))
        return choice

    def _check_truth(self, rows, topk, plan):
        for number, (request, _) in enumerate(rows):
            for token, slot in zip(topk[number], plan.slots[number], strict=True):
                if request is None or token < 0:
                    assert slot == -1
                    continue
                held = self.hot[number * self.geometry.capacity + slot]
                assert held == self.pool[self._row(request, token)], (request, token, slot)
                assert held[:2] == (request.name, token)


def wander(seed, steps):
    """A world after ``steps`` look-ups of random life."""
    rng = random.Random(seed)
    topk = rng.randint(1, 8)
    capacity = -(-topk // BLOCK) * BLOCK + BLOCK * rng.randint(0, 2)
    world = World(rng.randint(1, 6), topk, capacity)
    while world.steps < steps:
        dice = rng.random()
        if dice < 0.2 and world.can_join:
            world.join(rng.randint(0, POSITIONS - 4), rng)
        elif not world.requests:
            continue
        elif dice < 0.26:
            world.leave(rng.choice(world.requests))
        elif dice < 0.3:
            world.resume(rng.choice(world.requests), rng)
        elif dice < 0.33:
            rng.shuffle(world.requests)
        elif dice < 0.36:
            for table in (world.reference, *world.tables):
                table.clear()
        elif dice < 0.45:
            # Drafting: one row a request, nothing stored anew.
            world.look_up([(request, request.computed) for request in world.requests], rng)
        else:
            width = rng.randint(1, 3)
            running = rng.sample(world.requests, rng.randint(1, len(world.requests)))
            world.step(running, width, rng.randint(1, width), rng, look_up=rng.random() < 0.9)
        if all(request.computed > POSITIONS - 3 for request in world.requests):
            for request in list(world.requests):
                world.leave(request)
    return world
