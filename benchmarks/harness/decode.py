"""The benchmark's Decode process: a production Puller with validation, ledger, lease and registration on."""

import secrets
import time
from multiprocessing.connection import Connection

import numpy as np

from benchmarks.harness.cases import DECODE_SEED, PREFILL_SEED, CacheMemory, Case
from rd2h.children import ChildSpec, Outcome
from rd2h.decode.destination import Destination
from rd2h.decode.options import PullerOptions
from rd2h.decode.puller import Puller
from rd2h.engines import EngineRole, MemoryRegion, create_engine
from rd2h.layout import CacheLayout
from rd2h.plan import ChunkPlan, Descriptors, coalesce
from rd2h.stats import TransferStats
from rd2h.timeline import Timeline

FINISH_TIMEOUT_S = 30.0


class DecodeProcess:
    """See the module."""

    def __init__(
        self, backend: str, memory: CacheMemory, prefill_generation: int, cpus: frozenset[int] = frozenset()
    ) -> None:
        self.generation = secrets.randbits(63)
        self._memory, self._layout = memory, memory.layout()
        self._stats = TransferStats()
        self._engine = create_engine(backend)
        self._engine.initialize(EngineRole.DECODE)
        tensors = (tensor for layer in self._layout.layers for tensor in layer.tensors)
        self._engine.register_memory([MemoryRegion(t.base_addr, t.end_addr - t.base_addr) for t in tensors])
        self._puller = Puller(
            PullerOptions("127.0.0.1", 0, self.generation, b"", 1, cpus=cpus),
            Destination(self._layout, 0, 1, split_main=False),
            self._engine,
            self._stats,
            Timeline("D", None),
        )
        self._puller.start()
        self._puller.trust(frozenset({prefill_generation}))

    @property
    def port(self) -> int:
        """Where the puller listens."""
        return self._puller.port

    def add(self, case: Case, turn: int, tokens: list[bytes]) -> None:
        """Destinations of one chunk."""
        self._puller.add(
            [
                ChildSpec(token, f"request-{token.hex()}", f"cmpl-request-{index}", ids, 0, ids, 0)
                for index, (ids, token) in enumerate(zip(case.request_blocks(DECODE_SEED, turn), tokens, strict=True))
            ]
        )

    def finish(self, count: int) -> dict[str, float]:
        """Wait until ``count`` children are reported; all must be done. Returns the counters since the last call."""
        deadline = time.monotonic() + FINISH_TIMEOUT_S
        left = count
        while left:
            for child in self._puller.take_finished():
                if child.outcome is not Outcome.DONE:
                    raise RuntimeError(f"{child.request_id}: {child.outcome.value}: {child.reason}")
                left -= 1
            if time.monotonic() > deadline:
                raise RuntimeError(f"{left} of {count} children were not reported within {FINISH_TIMEOUT_S:g} s")
        return self._stats.take()

    def wrong_blocks(self, case: Case, turn: int) -> int:
        """Blocks that do not hold Prefill's bytes after this turn."""
        source, local = case.request_blocks(PREFILL_SEED, turn), case.request_blocks(DECODE_SEED, turn)
        return self._memory.unstamped(source, local)

    def wipe(self) -> None:
        """Forget all bytes that were pulled."""
        for buffers in self._memory.buffers:
            for buffer in buffers:
                buffer[:] = 0

    def engine_alone(self, case: Case, turn: int, session: str, source: CacheLayout) -> float:
        """Seconds that the engine itself takes for all layers of a chunk, on the descriptors the puller uses."""
        self._engine.open_session(session)
        theirs, ours = case.request_blocks(PREFILL_SEED, turn), case.request_blocks(DECODE_SEED, turn)
        runs = coalesce(np.concatenate(theirs), np.concatenate(ours))
        plan = ChunkPlan(runs, runs)
        pairs = zip(source.layers, self._layout.layers, strict=True)
        return self._read_all(session, [plan.descriptors(*pair) for pair in pairs])

    def _read_all(self, session: str, layers: list[Descriptors]) -> float:
        read = self._engine.batch_transfer_sync_read
        begin = time.perf_counter()
        for layer in layers:
            result = read(session, layer.local, layer.peer, layer.lengths)
            if not result.ok:
                raise RuntimeError(f"the engine failed: {result.message}")
        return time.perf_counter() - begin

    def close(self) -> None:
        """Stop the puller and the engine."""
        self._puller.close()
        self._engine.close()


def serve_decode(pipe: Connection) -> None:
    """Process: one Decode for each ("start", backend, Prefill generation, processors), until None."""
    memory = CacheMemory.allocate()
    decode: DecodeProcess | None = None
    while (command := pipe.recv()) is not None:
        name, *arguments = command
        answer: object = None
        if name == "start":
            decode = DecodeProcess(arguments[0], memory, *arguments[1:])
            answer = (decode.port, decode.generation)
        elif decode is None:
            raise RuntimeError(f"{name} before start")
        elif name == "add":
            decode.add(*arguments)
        elif name == "finish":
            answer = decode.finish(*arguments)
        elif name == "wrong_blocks":
            answer = decode.wrong_blocks(*arguments)
        elif name == "wipe":
            decode.wipe()
        elif name == "engine_alone":
            answer = decode.engine_alone(*arguments)
        elif name == "stop":
            decode.close()
        else:
            raise RuntimeError(f"unknown command {name!r}")
        pipe.send(answer)
