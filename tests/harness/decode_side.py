"""Decode ranks in one process: pullers over NumPy memory full of canaries."""

import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
from harness.cache import CANARY, Block, Cache, CacheSpec, Expected
from harness.controlled import ControlledEngine, ReadControl
from harness.plans import Child, Report

from rd2h.children import ChildSpec
from rd2h.decode.destination import Destination
from rd2h.decode.options import PullerOptions
from rd2h.decode.puller import Puller
from rd2h.engines import EngineRole, MemoryRegion, create_engine
from rd2h.errors import ConfigError
from rd2h.gates import Component
from rd2h.stats import TransferStats
from rd2h.timeline import Timeline

BIND_ATTEMPTS = 50


class DecodeRank:
    """One rank: memory, engine, puller."""

    def __init__(
        self, rank: int, tp_size: int, cache: Cache, options: PullerOptions, split_main: bool, backend: str
    ) -> None:
        self.rank, self.cache = rank, cache
        layout = cache.layout()
        self.engine = ControlledEngine(create_engine(backend))
        self.engine.inner.initialize(EngineRole.DECODE)
        tensors = (tensor for layer in layout.layers for tensor in layer.tensors)
        self.engine.inner.register_memory([MemoryRegion(t.base_addr, t.end_addr - t.base_addr) for t in tensors])
        self.stats = TransferStats()
        destination = Destination(layout, rank, tp_size, split_main)
        self.puller = Puller(options, destination, self.engine, self.stats, Timeline("D", None))

    def close(self) -> None:
        """Stop the puller and the engine."""
        self.puller.close()
        self.engine.inner.close()


class RepeatedAnswers:
    """Stands in for a router's ``send``: after each acknowledgement it may send older ones again."""

    def __init__(self, send: Callable[..., bool], times: int) -> None:
        self._send, self._times = send, times
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=64)
        self._lock = threading.Lock()

    def __call__(self, identity: bytes, *payloads: bytes) -> bool:
        """Send, then now and then repeat."""
        sent = self._send(identity, *payloads)
        for payload in payloads:
            if b"read_done" not in payload[:16]:
                continue
            with self._lock:
                self._sent.append((identity, payload))
                again = random.sample(list(self._sent), min(len(self._sent), random.randrange(self._times)))
            for one in again:
                self._send(*one)
        return sent


class DecodeSide:
    """All public methods may be called over the pipe."""

    def __init__(
        self,
        spec: CacheSpec,
        options: PullerOptions,
        *,
        split_main: bool = False,
        backend: str = "host",
        trusted: Iterable[int] = (),
    ) -> None:
        self._tp = options.tp_size
        first = Cache(spec)
        caches = [first] + [Cache(spec, first if split_main else None) for _ in range(1, self._tp)]
        for cache in caches:
            cache.fill_canary()
        self._caches = caches
        self._ranks = self._bind(options, split_main, backend)
        for rank in self._ranks:
            rank.puller.start()
        self.trust(trusted)

    def _bind(self, options: PullerOptions, split_main: bool, backend: str) -> list[DecodeRank]:
        if options.port:
            return self._bind_at(options.port, options, split_main, backend)
        if self._tp == 1:
            return [DecodeRank(0, 1, self._caches[0], options, split_main, backend)]
        for _ in range(BIND_ATTEMPTS):
            try:
                return self._bind_at(random.randrange(20_000, 60_000, 16), options, split_main, backend)
            except ConfigError:
                continue
        raise ConfigError(f"no {self._tp} consecutive free ports found")

    def _bind_at(self, base: int, options: PullerOptions, split_main: bool, backend: str) -> list[DecodeRank]:
        ranks: list[DecodeRank] = []
        try:
            for rank, cache in enumerate(self._caches):
                own = replace(options, port=base + rank)
                ranks.append(DecodeRank(rank, self._tp, cache, own, split_main, backend))
        except ConfigError:
            for made in ranks:
                made.close()
            raise
        return ranks

    def base_port(self) -> int:
        """Port of rank 0; the others follow."""
        return self._ranks[0].puller.port

    def trust(self, generations: Iterable[int]) -> None:
        """Prefill generations that are registered."""
        for rank in self._ranks:
            rank.puller.trust(frozenset(generations))

    def add(self, children: Sequence[Child], ranks: Sequence[int] | None = None) -> None:
        """Destinations on every rank."""
        specs = [
            ChildSpec(
                child.token or bytes(16),
                child.name,
                child.external_id or child.name,
                np.array(child.d_main, np.int64),
                child.start,
                np.array(child.d_indexer, np.int64),
                child.start,
            )
            for child in children
        ]
        for rank in self._ranks:
            if ranks is None or rank.rank in ranks:
                rank.puller.add(specs)

    def abort(self, names: Sequence[str]) -> None:
        """vLLM no longer wants these requests."""
        for rank in self._ranks:
            rank.puller.abort(names)

    def take_finished(self) -> list[Report]:
        """Reports of all ranks since the last call."""
        return [
            Report(rank.rank, done.request_id, done.outcome.value, done.reason)
            for rank in self._ranks
            for done in rank.puller.take_finished()
        ]

    def counts(self) -> tuple[int, int, int]:
        """(children, parked messages, reads in flight) summed over ranks."""
        counts = [rank.puller.counts() for rank in self._ranks]
        return (sum(c[0] for c in counts), sum(c[1] for c in counts), sum(c[2] for c in counts))

    def reads(self) -> tuple[int, int]:
        """(reads begun, reads returned) of all ranks."""
        return sum(rank.engine.started for rank in self._ranks), sum(rank.engine.returned for rank in self._ranks)

    def control(self, control: ReadControl, session: str = "", ranks: Sequence[int] | None = None) -> None:
        """Change what happens to reads from one session, or to all."""
        for rank in self._ranks:
            if ranks is not None and rank.rank not in ranks:
                continue
            if session:
                rank.engine.controls[session] = control
            else:
                rank.engine.default = control

    def repeat_answers(self, times: int) -> None:
        """From now on copies of earlier acknowledgements, at most ``times`` each, go out between the true ones."""
        for rank in self._ranks:
            router = rank.puller._router
            router.send = RepeatedAnswers(router.send, times)  # type: ignore[method-assign]

    def hold(self) -> None:
        """Stop reads before they begin."""
        for rank in self._ranks:
            rank.engine.hold()

    def release(self) -> None:
        """Let held reads go on."""
        for rank in self._ranks:
            rank.engine.release()

    def differences(self, expected: Expected) -> list[str]:
        """Blocks of any rank that hold anything but what is expected."""
        return [
            f"rank {rank}: {text}" for rank, cache in enumerate(self._caches) for text in cache.differences(expected)
        ]

    def own(self, main: Sequence[int], indexer: Sequence[int], content: int) -> None:
        """Blocks have another owner now, who wrote ``content`` into them."""
        for cache in self._caches:
            for layer in range(cache.spec.layers):
                cache.write(layer, Component.MAIN, [Block(b, content, b) for b in main])
                cache.write(layer, Component.INDEXER, [Block(b, content, b) for b in indexer])

    def missing(self, child: Child) -> list[str]:
        """Blocks of a child that do not hold its prompt, on any rank."""
        spec = self._caches[0].spec
        found = []
        for tensor in range(len(spec.tensor_bytes)):
            blocks = child.d_main if tensor < len(spec.main_bytes) else child.d_indexer
            for i, block in enumerate(blocks):
                item = Block(block, child.content, child.start + i)
                found += [
                    f"rank {rank} layer {layer} tensor {tensor} block {block}"
                    for rank, cache in enumerate(self._caches)
                    for layer in range(spec.layers)
                    if not cache.holds(layer, tensor, item)
                ]
        return found

    def clear(self, child: Child) -> None:
        """The blocks of a child are canaries again."""
        for cache in self._caches:
            for layer in range(cache.spec.layers):
                cache.write(layer, Component.MAIN, [Block(b, CANARY, b) for b in child.d_main])
                cache.write(layer, Component.INDEXER, [Block(b, CANARY, b) for b in child.d_indexer])

    def reset(self) -> None:
        """All memory is canary again."""
        for cache in self._caches:
            cache.fill_canary()

    def alive(self) -> bool:
        """Whether all threads of all pullers run."""
        return all(rank.puller.alive for rank in self._ranks)

    def stats(self) -> dict[str, float]:
        """Counters of all ranks since the last call."""
        total: dict[str, float] = {}
        for rank in self._ranks:
            for name, value in rank.stats.take().items():
                total[name] = total.get(name, 0.0) + value
        return total

    def rank_stats(self) -> list[dict[str, float]]:
        """Counters of each rank since the last call."""
        return [rank.stats.take() for rank in self._ranks]

    def close(self) -> None:
        """Stop everything."""
        self.release()
        for rank in self._ranks:
            rank.close()
