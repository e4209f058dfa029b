"""The pull book under everything at once, with simulated threads: what must hold, holds in every order of events.

Two contributors of the same children send chunks; reads overlap and combine, fail and return late; destinations come
late; requests are aborted; connections are lost or introduce themselves again; generations come and go; leases lapse.
"""

import random
import secrets
from collections import deque
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import pytest

from rd2h.children import ChildSpec, FailureKind, Outcome
from rd2h.decode.book import PullBook
from rd2h.decode.connection import MAX_RUNNING, Connection
from rd2h.decode.destination import Destination
from rd2h.decode.options import PullerOptions
from rd2h.decode.router import Received
from rd2h.decode.steps import Answer, ReadEnd, ReadTask, Turn
from rd2h.engines import READ_OK, ReadResult
from rd2h.layout import CacheLayout, LayerLayout, TensorLayout, encode_layer_map
from rd2h.stats import TransferStats
from rd2h.wire import (
    MfAck,
    PeerInfo,
    ReadDone,
    ReadFailed,
    ReadRequest,
    decode_from_decode,
    encode_mf_meta,
    encode_pong,
    encode_read_requests,
    encode_ready,
)

GENERATION = 7
LAYERS, BLOCK_BYTES, BLOCKS = 5, 64, 256
CHILD_BLOCKS, CUT = 4, 2
CHILDREN = 8
MEMBERS = 2
THREADS = 4
HOLD_S = 5.0
PARK_S = 5.0
SPAN = BLOCKS * BLOCK_BYTES
LOCAL, SOURCE = 1 << 40, 1 << 30


def layout(base: int) -> CacheLayout:
    def tensor(number: int) -> TensorLayout:
        return TensorLayout(base + number * SPAN, BLOCK_BYTES, BLOCKS)

    return CacheLayout(
        tuple(LayerLayout(f"l.{i}", (tensor(2 * i),), tensor(2 * i + 1)) for i in range(LAYERS)),
    )


Cell = tuple[int, int]
"""(tensor over all layers, block) of Decode's memory; even tensors are main, odd ones the indexer."""


def cells_of(task: ReadTask) -> set[Cell]:
    """What a read writes."""
    cells = set()
    for local, length in zip(task.descriptors.local.tolist(), task.descriptors.lengths.tolist(), strict=True):
        first = (local - LOCAL) // BLOCK_BYTES
        cells |= {divmod(first + i, BLOCKS) for i in range(length // BLOCK_BYTES)}
    return cells


@dataclass
class Child:
    """One request and what became of it."""

    name: str
    first_block: int
    token: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    added: bool = False
    outcome: Outcome | None = None
    kind: FailureKind | None = None
    aborted: bool = False
    not_before_s: float = 0.0
    good: set[tuple[int, Cell]] = field(default_factory=set)
    """(member, cell) that arrived in reads that may be used."""

    @property
    def blocks(self) -> list[int]:
        return [self.first_block + (7 * i) % CHILD_BLOCKS for i in range(CHILD_BLOCKS)]

    @property
    def cells(self) -> set[Cell]:
        return {(tensor, block) for tensor in range(2 * LAYERS) for block in self.blocks}


class State(Enum):
    TURN = "has the turn of a connection"
    KEPT = "reads with the turn"
    FREE = "reads without the turn"


@dataclass
class Thread:
    """A serving thread."""

    peer: "Peer"
    connection: Connection
    state: State = State.TURN
    task: ReadTask | None = None


@dataclass
class Peer:
    """One Prefill rank; a new connection after each loss."""

    member: int
    identity: bytes = b""
    connection: Connection | None = None
    script: deque[tuple[bytes, int, list[Child], bool]] = field(default_factory=deque)
    """(read requests, layer, children that end here, first layer of its chunk)"""
    seq: int = 0
    sent: list[int] = field(default_factory=list)
    answered: list[int] = field(default_factory=list)

    @property
    def generation(self) -> int:
        return 100 + self.member


class World:
    """Book, peers, threads and time."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.calm = seed % 5 == 0
        """Nothing goes wrong: every child must be done."""
        options = PullerOptions(
            "127.0.0.1", 0, GENERATION, b"", 1, hold_s=HOLD_S, park_timeout_s=PARK_S, read_threads=THREADS
        )
        self.book = PullBook(options, Destination(layout(LOCAL), 0, 1, False), TransferStats())
        self.now_s = 1.0
        self.children = [Child(f"r{n}", 16 + n * CHILD_BLOCKS) for n in range(CHILDREN)]
        self.peers = [Peer(member) for member in range(MEMBERS)]
        self.queue: deque[tuple[Peer, Connection]] = deque()
        self.threads: list[Thread] = []
        self.owner = {block: child for child in self.children for block in child.blocks}
        self.trusted = frozenset(peer.generation for peer in self.peers)
        self.book.trust(self.trusted, self.now_s)
        for peer in self.peers:
            self._write_script(peer)
            self._connect(peer)

    # --- what Prefill does ---

    def _write_script(self, peer: Peer) -> None:
        waiting = list(self.children)
        while waiting:
            group, waiting = waiting[:2], waiting[2:]
            for start, stop in ((0, CUT), (CUT, CHILD_BLOCKS)):
                source = np.arange(start, stop, dtype=np.int64)
                raw = encode_read_requests(
                    [
                        ReadRequest(c.name, source + c.first_block, source + c.first_block, start, start, c.token)
                        for c in group
                    ]
                )
                for layer in range(LAYERS):
                    last = stop == CHILD_BLOCKS and layer == LAYERS - 1
                    peer.script.append((raw, layer, group if last else [], layer == 0))
                    if not self.calm and self.chance.random() < 0.05:
                        peer.script.append((raw, self.chance.randrange(LAYERS), [], False))  # once more

    def _connect(self, peer: Peer) -> None:
        peer.identity = secrets.token_bytes(5)
        peer.connection = None
        peer.sent, peer.answered = [], []
        self._introduce(peer)
        self._renew(peer)

    def _introduce(self, peer: Peer) -> None:
        info = PeerInfo(1, peer.generation, b"", MEMBERS, peer.member, joint_acks=bool(peer.member))
        self._accept(peer, encode_mf_meta("session", encode_layer_map(layout(SOURCE)), info))
        peer.connection = self.book.connections[peer.identity]

    def _renew(self, peer: Peer) -> None:
        # Its pong can only come once Decode has its metadata; the lease is set by hand, for brevity.
        connection = self.book.connections[peer.identity]
        connection.lease.start_ns = int(self.now_s * 1e9)
        self._accept(peer, encode_pong(peer.generation, int(self.now_s * 1e9)))

    def _accept(self, peer: Peer, payload: bytes) -> None:
        connection, answer = self.book.accept(
            Received(peer.identity, payload, "127.0.0.1"), self.now_s, int(self.now_s * 1e9)
        )
        if answer is not None:
            self._answer(peer, answer)
        if connection is not None:
            self._put(peer, connection)

    def send(self, peer: Peer) -> None:
        raw, layer, ends, _ = peer.script.popleft()
        peer.seq += 1
        peer.sent.append(peer.seq)
        names, tokens = [c.name for c in ends], [c.token for c in ends]
        ready = encode_ready(layer, f"l.{layer}", raw, names, peer.member, MEMBERS, (GENERATION, peer.seq, tokens))
        self._accept(peer, ready)

    def lose(self, peer: Peer) -> None:
        self.book.drop(peer.identity, "lost", self.now_s)
        self._connect(peer)

    # --- what Decode's threads do ---

    def _put(self, peer: Peer, connection: Connection) -> None:
        assert all(connection is not waiting for _, waiting in self.queue), "queued twice"
        assert not any(t.connection is connection and t.state is not State.FREE for t in self.threads), (
            "two threads have the turn"
        )
        self.queue.append((peer, connection))

    def _unparked(self, connections: list[Connection]) -> None:
        for connection in connections:
            (peer,) = (p for p in self.peers if p.connection is connection)
            self._put(peer, connection)

    def take(self) -> None:
        self.threads.append(Thread(*self.queue.popleft()))

    def step(self, thread: Thread) -> None:
        step = self.book.next_step(thread.connection, self.now_s, int(self.now_s * 1e9))
        if step is None:
            self.threads.remove(thread)
        elif isinstance(step, Answer):
            if step.open_session is not None:
                step = self.book.session_opened(thread.connection, int(self.now_s * 1e9), "")
            self._answer(thread.peer, step, thread.connection)
            if self.chance.random() < 0.2:
                self.threads.remove(thread)
                self._put(thread.peer, thread.connection)
        else:
            self._begin(thread, step)

    def _begin(self, thread: Thread, task: ReadTask) -> None:
        for tensor, block in cells_of(task):
            child = self.owner[block]
            assert child.outcome is None, "a read into blocks that were given back"
            assert not child.aborted, "a read that began after the abort"
            assert child.added
            assert tensor < 2 * LAYERS
        thread.task = task
        thread.state = State.KEPT if task.turn is Turn.KEPT else State.FREE
        if task.turn is Turn.PASSED_ON:
            self._put(thread.peer, thread.connection)
        reading = [t for t in self.threads if t.connection is thread.connection and t.task is not None]
        assert len(reading) <= MAX_RUNNING
        if len(reading) == MAX_RUNNING:
            busy = sum(t.task is not None for t in self.threads)
            assert busy < THREADS, "a second read took the last thread"

    def end(self, thread: Thread) -> None:
        task, connection = thread.task, thread.connection
        assert task is not None
        thread.task = None
        broken = not self.calm and self.chance.random() < 0.08
        result = ReadResult(5, "broken") if broken else READ_OK
        ended = ReadEnd(result, self.chance.choice((0.0, 1.0)), int(self.now_s * 1e9))
        usable = result.ok and connection.lease.valid(ended.at_ns)
        for cell in cells_of(task):
            child = self.owner[cell[1]]
            assert child.outcome is None, "blocks were given back while a read wrote into them"
            if broken:
                child.not_before_s = max(child.not_before_s, self.now_s + HOLD_S)
            if usable:
                child.good.add((thread.peer.member, cell))
            else:
                child.good.discard((thread.peer.member, cell))
        if thread.state is State.KEPT:
            answer = self.book.finish_read(connection, task, ended, self.now_s, int(self.now_s * 1e9))
            thread.state = State.TURN
            self._answer(thread.peer, answer, connection)
        elif self.book.read_returned(connection, task, ended):
            assert not any(
                t is not thread and t.connection is connection and t.state is not State.FREE for t in self.threads
            ), "two threads have the turn"
            assert all(connection is not waiting for _, waiting in self.queue)
            thread.state = State.TURN
        else:
            self.threads.remove(thread)

    def _answer(self, peer: Peer, answer: Answer, connection: Connection | None = None) -> None:
        if connection is not None and connection is not peer.connection:
            return  # nobody is there any more
        for payload in answer.payloads:
            message = decode_from_decode(payload)
            if isinstance(message, ReadDone):
                peer.answered += [message.seq or 0, *(seq for _, seq in message.also)]
            elif isinstance(message, ReadFailed):
                peer.answered.append(message.seq or 0)
            else:
                assert isinstance(message, MfAck)
        assert peer.answered == peer.sent[: len(peer.answered)], "answers keep the order of their messages"

    # --- what vLLM does ---

    def add(self, child: Child) -> None:
        blocks = np.array(child.blocks, np.int64)
        child.added = True
        self._unparked(
            self.book.add([ChildSpec(child.token, child.name, child.name, blocks, 0, blocks, 0)], self.now_s)
        )

    def abort(self, child: Child) -> None:
        child.aborted = child.added
        self.book.abort([child.name], self.now_s)

    def collect(self) -> None:
        for report in self.book.take_finished(self.now_s):
            (child,) = (c for c in self.children if c.token == report.token)
            assert child.outcome is None, "reported twice"
            assert self.now_s >= child.not_before_s, "reported while bytes may still land"
            for thread in self.threads:
                assert thread.task is None or not cells_of(thread.task) & child.cells, "reported in mid-read"
            child.outcome, child.kind = report.outcome, report.kind
            if report.outcome is Outcome.DONE:
                for cell in child.cells:
                    main = cell[0] % 2 == 0
                    assert any((member, cell) in child.good for member in ([0] if main else range(MEMBERS))), cell

    # --- events ---

    def events(self) -> list[tuple[float, object]]:
        events: list[tuple[float, object]] = [(0.3, self.collect)]
        events += [(3.0, lambda p=p: self.send(p)) for p in self.peers if p.script]
        events += [(0.3, lambda c=c: self.add(c)) for c in self.children if not c.added]
        if self.queue and len(self.threads) < THREADS:
            events.append((4.0, self.take))
        for thread in self.threads:
            act = self.step if thread.state is State.TURN else self.end
            events.append((2.0, lambda act=act, thread=thread: act(thread)))
        if not self.calm:
            events += [(0.04, lambda c=c: self.abort(c)) for c in self.children if c.outcome is None]
            events += [(0.01, lambda p=p: self.lose(p)) for p in self.peers]
            events += [(0.02, lambda p=p: self._introduce(p)) for p in self.peers]
            events += [(0.01, lambda p=p: self._lapse(p)) for p in self.peers]
            events.append((0.03, self._toggle_trust))
            events.append((0.2, self._pass_time))
        return events

    def _lapse(self, peer: Peer) -> None:
        connection = self.book.connections[peer.identity]
        if connection.lease.valid(int(self.now_s * 1e9)):
            connection.lease.start_ns = None
        elif not connection.running and not any(t.connection is connection and t.task for t in self.threads):
            # A lease that comes back on the same connection would make good what was read meanwhile.
            self._renew(peer)

    def _toggle_trust(self) -> None:
        everybody = frozenset(peer.generation for peer in self.peers)
        self.trusted = everybody if self.trusted != everybody else everybody - {self.peers[0].generation}
        self._unparked(self.book.trust(self.trusted, self.now_s))

    def _pass_time(self) -> None:
        self.now_s += self.chance.random() * PARK_S / 2
        for peer in self.peers:
            if self.book.connections[peer.identity].lease.start_ns is not None:
                self._renew(peer)
        self._unparked(self.book.unpark_due(self.now_s))

    def run(self) -> None:
        for _ in range(4000):
            events = self.events()
            (event,) = self.chance.choices([e for _, e in events], [w for w, _ in events])
            event()  # type: ignore[operator]
            if not any(p.script for p in self.peers) and all(c.added for c in self.children):
                break
        else:
            raise AssertionError("the storm never ended")
        self.settle()

    def settle(self) -> None:
        """Everything that can go on does, in any order; then all time limits pass."""
        for _ in range(3):
            while self.threads or self.queue:
                acts = [
                    lambda t=t: self.step(t) if t.state is State.TURN else self.end(t)  # type: ignore[misc]
                    for t in self.threads
                ]
                if self.queue and len(self.threads) < THREADS:
                    acts.append(self.take)
                self.chance.choice(acts)()
            self.now_s += 2 * PARK_S
            for peer in self.peers:
                self._renew(peer)
            self._unparked(self.book.unpark_due(self.now_s))
        self.collect()
        for peer in self.peers:
            assert peer.answered == peer.sent, "a message was never answered"
            assert peer.connection is not None
            idle = (peer.connection.busy, len(peer.connection.jobs), len(peer.connection.running))
            assert idle == (False, 0, 0)
        self.now_s += 1000.0
        self.collect()
        self.now_s += HOLD_S
        self.collect()
        assert self.book.counts() == (0, 0, 0)
        assert all(child.outcome is not None for child in self.children)


@pytest.mark.parametrize("batch", range(20))
def test_a_storm(batch: int) -> None:
    outcomes = []
    for seed in range(batch * 50, batch * 50 + 50):
        world = World(seed)
        world.run()
        outcomes += [child.outcome for child in world.children]
        if world.calm:
            assert all(child.outcome is Outcome.DONE for child in world.children), seed
    assert set(outcomes) == set(Outcome)
