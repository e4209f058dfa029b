"""Prefill and Decode processes of one test, and the few verbs that tests are written in."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from harness.cache import Block, CacheSpec, Expected
from harness.decode_side import DecodeSide
from harness.plans import Child, DecodeAddress, Part, Report
from harness.prefill_side import PrefillSide
from harness.scripted import ScriptedPrefill
from harness.waiting import wait_for
from harness.worker import Worker

from rd2h.decode.options import PullerOptions
from rd2h.prefill.options import PublisherOptions
from rd2h.wire import MfAck, PeerInfo, encode_mf_meta, encode_pong

DECODE_OPTIONS = PullerOptions("127.0.0.1", 0, 0, b"", 1, park_timeout_s=20.0, idle_timeout_s=60.0, hold_s=0.2)


def new_generation() -> int:
    """A generation as an engine draws it at its start."""
    return secrets.randbits(63) | 1


@dataclass
class Prefill:
    """One Prefill process."""

    worker: Worker
    generation: int
    spec: CacheSpec

    @classmethod
    def start(
        cls,
        worker: Worker,
        spec: CacheSpec,
        *,
        generation: int = 0,
        tp_size: int = 1,
        options: PublisherOptions | None = None,
        backend: str = "host",
    ) -> "Prefill":
        """Start Prefill in a worker process."""
        generation = generation or new_generation()
        worker.start(PrefillSide, spec, generation, tp_size=tp_size, options=options, backend=backend)
        return cls(worker, generation, spec)

    def publish(self, parts: Sequence[Part], **kwargs: object) -> None:
        """See PrefillSide."""
        self.worker.call("publish", list(parts), **kwargs)

    def reason_of(self, child: Child) -> str | None:
        """Why the child gets no more KV, as Prefill knows it."""
        return self.worker.call("failures").get(child.token)

    def wait_settled(self, deadline_s: float = 30.0) -> None:
        """Wait until nothing is unacknowledged."""
        wait_for("every ready message acknowledged", lambda: self.worker.call("outstanding") == 0, deadline_s)


@dataclass
class Decode:
    """One Decode process. ``reports`` holds everything that was ever reported, in order."""

    worker: Worker
    address: DecodeAddress
    spec: CacheSpec
    reports: list[Report] = field(default_factory=list)
    expected: Expected = field(default_factory=Expected)

    @classmethod
    def start(
        cls,
        worker: Worker,
        spec: CacheSpec,
        *,
        options: PullerOptions = DECODE_OPTIONS,
        tp_size: int = 1,
        port: int = 0,
        split_main: bool = False,
        backend: str = "host",
        trusted: Sequence[int] = (),
    ) -> "Decode":
        """Start Decode in a worker process."""
        options = replace(options, generation=new_generation(), tp_size=tp_size, port=port)
        worker.start(DecodeSide, spec, options, split_main=split_main, backend=backend, trusted=tuple(trusted))
        address = DecodeAddress(worker.call("base_port"), options.generation, tp_size)
        return cls(worker, address, spec)

    def add(self, *children: Child, **kwargs: object) -> None:
        """Register destinations."""
        self.worker.call("add", list(children), **kwargs)

    def poll(self) -> list[Report]:
        """Fetch reports; returns all there ever were."""
        self.reports += self.worker.call("take_finished")
        return self.reports

    def outcomes(self, child: Child) -> list[str]:
        """Outcomes reported for a child, over all ranks."""
        return [report.outcome for report in self.poll() if report.name == child.name]

    def reasons(self, child: Child) -> str:
        """Reasons reported for a child, over all ranks."""
        return "; ".join(report.reason for report in self.poll() if report.name == child.name)

    def wait_reported(self, child: Child, outcome: str, deadline_s: float = 30.0) -> str:
        """Wait until every rank has reported the child; all with ``outcome``. Returns the reasons."""
        ranks = self.address.tp_size
        wait_for(f"{child.name} reported", lambda: len(self.outcomes(child)) >= ranks, deadline_s)
        assert self.outcomes(child) == [outcome] * ranks, self.reports
        return self.reasons(child)

    def expect(self, *children: Child) -> None:
        """From now on these children's blocks must hold their prompts."""
        for child in children:
            main, indexer = pulled(child)
            self.expected.main += main
            self.expected.indexer += indexer

    def give_away(self, child: Child, content: int) -> None:
        """The child's blocks belong to somebody else now, who has written ``content`` into them."""
        self.worker.call("own", child.d_main, child.d_indexer, content)
        self.expected.main += [Block(block, content, block) for block in child.d_main]
        self.expected.indexer += [Block(block, content, block) for block in child.d_indexer]

    def check(self) -> None:
        """Every byte is as expected: what was pulled, and canaries everywhere else."""
        assert self.worker.call("differences", self.expected) == []

    def check_baseline(self) -> None:
        """No child, no parked message, no read is left, and every thread runs."""
        wait_for("no state left", lambda: self.worker.call("counts") == (0, 0, 0), 10.0)
        assert self.worker.call("alive")


def pulled(child: Child) -> tuple[list[Block], list[Block]]:
    """What main and indexer blocks of Decode hold when the child is done."""
    main = [Block(block, child.content, child.start + i) for i, block in enumerate(child.d_main)]
    indexer = [Block(block, child.content, child.start + i) for i, block in enumerate(child.d_indexer)]
    return main, indexer


class BlockPool:
    """Hands out disjoint block ids in an order that is contiguous in places."""

    def __init__(self, blocks: int) -> None:
        self._free = [block for start in (1, 0) for block in range(start, blocks, 2)]
        self._free[: blocks // 4] = sorted(self._free[: blocks // 4])

    def take(self, count: int) -> list[int]:
        """``count`` block ids."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} are free")
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give(self, blocks: Sequence[int]) -> None:
        """Return block ids."""
        self._free += blocks

    def __len__(self) -> int:
        return len(self._free)


@dataclass
class Prompts:
    """Makes children with blocks of their own on one Prefill and one Decode."""

    spec: CacheSpec
    p_main: BlockPool = field(init=False)
    p_indexer: BlockPool = field(init=False)
    d_main: BlockPool = field(init=False)
    d_indexer: BlockPool = field(init=False)
    made: int = 0

    def __post_init__(self) -> None:
        for name in ("p_main", "p_indexer", "d_main", "d_indexer"):
            setattr(self, name, BlockPool(self.spec.blocks))
        self.p_indexer.give(self.p_indexer.take(3))  # main and indexer ids differ
        self.d_indexer.give(self.d_indexer.take(5))

    def child(self, blocks: int, *, start: int = 0, name: str = "", **fields: object) -> Child:
        """A child of ``blocks`` prompt blocks, of which Decode lacks those from ``start``."""
        self.made += 1
        child = Child(
            name=name or f"cmpl-{self.made}",
            content=self.made,
            p_main=self.p_main.take(blocks),
            p_indexer=self.p_indexer.take(blocks),
            d_main=self.d_main.take(blocks - start),
            d_indexer=self.d_indexer.take(blocks - start),
            start=start,
        )
        return replace(child, **fields) if fields else child


def parts(child: Child, target: DecodeAddress, *cuts: int) -> list[Part]:
    """The chunks of a child, cut at these prompt blocks; each is published on its own."""
    edges = [child.start, *cuts, child.blocks]
    return [Part(child, target, begin, end, end == child.blocks) for begin, end in pairwise(edges)]


def connect_by_hand(prefill: Prefill, decode: Decode) -> ScriptedPrefill:
    """A connection that has sent this Prefill's metadata and is trusted."""
    raw = ScriptedPrefill(decode.address.base_port, prefill.generation)
    peer = PeerInfo(1, prefill.generation, b"", 1, 0)
    raw.send(encode_mf_meta(prefill.worker.call("session"), prefill.worker.call("layer_map"), peer))
    ack = raw.receive()
    assert isinstance(ack, MfAck)
    assert not ack.error
    raw.send(encode_pong(prefill.generation, ack.clock_ns))
    return raw
