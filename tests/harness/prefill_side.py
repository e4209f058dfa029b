"""Prefill ranks in one process, driven like a forward pass: wait for gates, write a layer, publish it."""

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from harness.cache import OVERWRITTEN, Block, Cache, CacheSpec
from harness.plans import Part

from rd2h.engines import EngineRole, MemoryRegion, create_engine
from rd2h.gates import ALL_BLOCKS, ChunkBlocks, Component, Writes
from rd2h.layout import encode_layer_map
from rd2h.prefill.endpoint import EndpointChunk, EndpointKey
from rd2h.prefill.publisher import Publisher, PublisherOptions, SourceMemory
from rd2h.stats import TransferStats
from rd2h.topology import TpMapping
from rd2h.wire import WIRE_VERSION, PeerInfo, ReadRequest, Refusal, encode_read_requests


class PrefillRank:
    """One rank: memory, engine, publisher."""

    def __init__(
        self, rank: int, tp_size: int, generation: int, spec: CacheSpec, options: PublisherOptions, backend: str
    ) -> None:
        self.rank, self.tp_size = rank, tp_size
        self.cache = Cache(spec)
        layout = self.cache.layout()
        self.slots = self.cache.slots()
        self.engine = create_engine(backend)
        self.engine.initialize(EngineRole.PREFILL)
        tensors = (tensor for layer in layout.layers for tensor in layer.tensors)
        self.engine.register_memory([MemoryRegion(t.base_addr, t.end_addr - t.base_addr) for t in tensors])
        self.stats = TransferStats()
        self.failures: dict[bytes, str] = {}
        self.publisher = Publisher(
            SourceMemory(
                self.engine.session(),
                encode_layer_map(layout),
                [layer.name for layer in layout.layers],
                self.slots,
                PeerInfo(WIRE_VERSION, generation, b"", tp_size, rank, joint_acks=True),
            ),
            options,
            self.stats,
            self._failed,
        )
        self.publisher.start()

    def chunks(self, parts: Sequence[Part]) -> list[EndpointChunk]:
        """One chunk for each endpoint, complete block lists in each."""
        by_key: dict[EndpointKey, list[Part]] = {}
        for part in parts:
            target = part.target
            port = target.base_port + TpMapping.of(self.tp_size, target.tp_size).decode_rank(self.rank)
            by_key.setdefault(EndpointKey(target.host, port, target.generation), []).append(part)
        return [self._chunk(key, of_key) for key, of_key in by_key.items()]

    def _chunk(self, key: EndpointKey, parts: Sequence[Part]) -> EndpointChunk:
        mapping = TpMapping.of(self.tp_size, parts[0].target.tp_size)
        legacy = key.generation is None
        requests = [
            ReadRequest(
                part.child.external_id if legacy else part.child.name,
                np.array(part.child.p_main[part.start : part.stop], np.int64),
                np.array(part.child.p_indexer[part.start : part.stop], np.int64),
                part.start,
                part.start,
                part.child.token,
            )
            for part in parts
        ]
        final = [part.child for part in parts if part.final]
        return EndpointChunk(
            key=key,
            requests_raw=encode_read_requests([r for r in requests if len(r.main_blocks)], legacy_ids=legacy),
            blocks=ChunkBlocks(
                frozenset(int(b) for r in requests for b in r.main_blocks),
                frozenset(int(b) for r in requests for b in r.indexer_blocks),
            ),
            tokens=tuple(part.child.token for part in parts if part.child.token is not None),
            done_ids=tuple(child.external_id if legacy else child.name for child in final),
            done_tokens=tuple(child.token for child in final if child.token is not None),
            member=mapping.member(self.rank),
            ratio=mapping.ratio,
        )

    def compute(self, layer: int, parts: Sequence[Part]) -> None:
        """Write one layer of all parts, behind the gates of exactly these blocks."""
        main, indexer = _written(parts)
        writes = Writes({item.block for item in main}, {item.block for item in indexer})
        self.publisher.wait_writable(self.slots[layer], writes)
        self.cache.write(layer, Component.MAIN, main)
        self.cache.write(layer, Component.INDEXER, indexer)

    def close(self) -> None:
        """Stop the publisher and the engine."""
        self.publisher.close()
        self.engine.close()

    def _failed(self, refusals: Sequence[Refusal]) -> None:
        for refusal in refusals:
            self.failures.setdefault(refusal.token, refusal.reason)


def _written(parts: Sequence[Part]) -> tuple[list[Block], list[Block]]:
    main = [
        Block(part.child.p_main[position], part.child.content, position)
        for part in parts
        for position in range(part.start, part.stop)
    ]
    indexer = [
        Block(part.child.p_indexer[position], part.child.content, position)
        for part in parts
        for position in range(part.start, part.stop)
    ]
    return main, indexer


class PrefillSide:
    """All public methods may be called over the pipe."""

    def __init__(
        self,
        spec: CacheSpec,
        generation: int,
        *,
        tp_size: int = 1,
        options: PublisherOptions | None = None,
        backend: str = "host",
    ) -> None:
        self._spec = spec
        options = options or PublisherOptions()
        self._ranks = [PrefillRank(r, tp_size, generation, spec, options, backend) for r in range(tp_size)]
        self._background: threading.Thread | None = None

    def publish(
        self,
        parts: Sequence[Part],
        layers: Sequence[int] | None = None,
        skip: Sequence[int] = (),
        ranks: Sequence[int] | None = None,
        write: bool = True,
    ) -> None:
        """One chunk through the given layers (all by default). ``skip``: layers that are computed but never sent."""
        chosen = [rank for rank in self._ranks if ranks is None or rank.rank in ranks]
        chunks = {rank.rank: rank.chunks(parts) for rank in chosen}
        for layer in range(self._spec.layers) if layers is None else layers:
            for rank in chosen:
                if write:
                    rank.compute(layer, parts)
                if layer not in skip:
                    last = layer == self._spec.layers - 1
                    rank.publisher.publish(layer, chunks[rank.rank], last_layer=last)

    def overwrite(self, blocks: Sequence[int], layers: Sequence[int] | None = None) -> float:
        """Reuse blocks of both components as soon as the gates allow; returns the seconds waited."""
        begin = time.monotonic()
        for layer in range(self._spec.layers) if layers is None else layers:
            for rank in self._ranks:
                rank.publisher.wait_writable(rank.slots[layer], Writes(set(blocks), set(blocks)))
                for component in Component:
                    rank.cache.write(layer, component, [Block(b, OVERWRITTEN, b) for b in blocks])
        return time.monotonic() - begin

    def wait_all(self) -> float:
        """Wait for every gate; returns the seconds waited."""
        begin = time.monotonic()
        for rank in self._ranks:
            rank.publisher.wait_writable(None, ALL_BLOCKS)
        return time.monotonic() - begin

    def publish_timed(self, parts: Sequence[Part]) -> list[float]:
        """One chunk, layer by layer, each acknowledged before the next; returns seconds a layer."""
        rank = self._ranks[0]
        chunks = rank.chunks(parts)
        times = []
        for layer in range(self._spec.layers):
            rank.compute(layer, parts)
            begin = time.perf_counter()
            rank.publisher.publish(layer, chunks, last_layer=layer == self._spec.layers - 1)
            rank.publisher.wait_writable(rank.slots[layer], ALL_BLOCKS)
            times.append(time.perf_counter() - begin)
        return times

    def fail_child(self, part: Part, reason: str) -> None:
        """Tell Decode that this child will not come."""
        for rank in self._ranks:
            for chunk in rank.chunks([part]):
                rank.publisher.fail_children(chunk.key, [Refusal(token, reason) for token in chunk.tokens])

    def outstanding(self) -> int:
        """Unacknowledged messages of all ranks."""
        return sum(rank.publisher.outstanding() for rank in self._ranks)

    def failures(self) -> dict[bytes, str]:
        """Children that get no more KV, with the first reason."""
        return {token: reason for rank in self._ranks for token, reason in rank.failures.items()}

    def stopped(self, token: bytes) -> str | None:
        """Why a child is not published any more."""
        return self._ranks[0].publisher.stopped(token)

    def alive(self) -> bool:
        """Whether all publisher threads run."""
        return all(rank.publisher.alive for rank in self._ranks)

    def stats(self) -> dict[str, float]:
        """Counters of all ranks since the last call."""
        total: dict[str, float] = {}
        for rank in self._ranks:
            for name, value in rank.stats.take().items():
                total[name] = total.get(name, 0.0) + value
        return total

    def session(self, rank: int = 0) -> str:
        """Engine session of a rank."""
        return self._ranks[rank].engine.session()

    def layer_map(self, rank: int = 0) -> Any:
        """Encoded layer metadata of a rank."""
        return encode_layer_map(self._ranks[rank].cache.layout())

    def cpu_s(self) -> float:
        """CPU time of this process."""
        return time.process_time()

    def write(self, parts: Sequence[Part]) -> None:
        """Only write, on every layer and rank."""
        for layer in range(self._spec.layers):
            for rank in self._ranks:
                rank.compute(layer, parts)

    def close(self) -> None:
        """Stop everything."""
        for rank in self._ranks:
            rank.close()
