"""The benchmark's Prefill process: a production Publisher, driven as a forward pass drives it."""

import os
import secrets
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

from benchmarks.harness.cases import LAYERS, PREFILL_SEED, CacheMemory, Case, layer_slots
from benchmarks.harness.clocks import process_cpu_s
from rd2h.cpus import bind_this_thread
from rd2h.engines import EngineRole, MemoryRegion, create_engine
from rd2h.gates import ALL_BLOCKS, ChunkBlocks
from rd2h.layout import encode_layer_map
from rd2h.prefill.endpoint import EndpointChunk, EndpointKey
from rd2h.prefill.publisher import Publisher, PublisherOptions, SourceMemory
from rd2h.stats import TransferStats
from rd2h.wire import (
    WIRE_VERSION,
    PeerInfo,
    ReadRequest,
    Refusal,
    encode_read_done,
    encode_read_requests,
    encode_ready,
)

SERIAL, PIPELINED = "serial", "pipelined"


@dataclass(frozen=True, slots=True)
class Target:
    """Where Decode is, for the Prefill process."""

    port: int
    generation: int
    pid: int


@dataclass(frozen=True, slots=True)
class ChunkTimes:
    """One chunk; times in seconds. CPU covers ``cpu_layers`` layers, as processes (all threads)."""

    acks: list[float]
    chunk: float
    p_cpu: float
    d_cpu: float
    cpu_layers: int


def make_chunk(case: Case, turn: int, target: Target, tokens: list[bytes]) -> EndpointChunk:
    """The chunk of one case, as Prefill's connector builds it once for all layers."""
    blocks = case.request_blocks(PREFILL_SEED, turn)
    requests = [
        ReadRequest(f"cmpl-request-{index}", ids, ids, 0, 0, token)
        for index, (ids, token) in enumerate(zip(blocks, tokens, strict=True))
    ]
    everything = frozenset(int(block) for ids in blocks for block in ids)
    return EndpointChunk(
        key=EndpointKey("127.0.0.1", target.port, target.generation),
        requests_raw=encode_read_requests(requests),
        blocks=ChunkBlocks(everything, everything),
        tokens=tuple(tokens),
        done_ids=tuple(request.request_id for request in requests),
        done_tokens=tuple(tokens),
        member=0,
        ratio=1,
    )


def payload_bytes(case: Case) -> tuple[int, int]:
    """(ready message, acknowledgement) sizes of a middle layer."""
    target = Target(1, secrets.randbits(63), 0)
    chunk = make_chunk(case, 0, target, [secrets.token_bytes(16) for _ in range(case.requests)])
    name = f"model.layers.{LAYERS // 2}.self_attn.attn"
    ready = encode_ready(LAYERS // 2, name, chunk.requests_raw, (), 0, 1, (target.generation, 1000, ()))
    return len(ready), len(encode_read_done(LAYERS // 2, 1000))


class AckClock(TransferStats):
    """The publisher's counters, which also note when it has handled an acknowledgement."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def add(self, **amounts: float) -> None:
        """See the base class."""
        if "acks" in amounts:
            self.times.append(time.perf_counter())
        super().add(**amounts)


class PrefillProcess:
    """See the module. The harness itself only stamps times around the calls of the production code."""

    def __init__(self, backend: str, memory: CacheMemory, pid: int, cpus: frozenset[int] = frozenset()) -> None:
        bind_this_thread(cpus)  # the forward thread, which deployments bind with the rest of the worker
        self.generation = secrets.randbits(63)
        self._pid = pid
        self._failures: list[Refusal] = []
        self._acks = AckClock()
        layout = memory.layout()
        self.engine = create_engine(backend)
        self.engine.initialize(EngineRole.PREFILL)
        tensors = (tensor for layer in layout.layers for tensor in layer.tensors)
        self.engine.register_memory([MemoryRegion(t.base_addr, t.end_addr - t.base_addr) for t in tensors])
        self._slots = layer_slots()
        self._publisher = Publisher(
            SourceMemory(
                self.engine.session(),
                encode_layer_map(layout),
                [layer.name for layer in layout.layers],
                self._slots,
                PeerInfo(WIRE_VERSION, self.generation, b"", 1, 0, joint_acks=True),
            ),
            PublisherOptions(cpus=cpus),
            self._acks,
            self._failures.extend,
        )
        self._publisher.start()

    def run_chunk(self, case: Case, turn: int, mode: str, target: Target, tokens: list[bytes]) -> ChunkTimes:
        """Publish all layers of one chunk and wait for every acknowledgement."""
        chunk = make_chunk(case, turn, target, tokens)
        self._acks.times.clear()
        times = self._serial(chunk, target) if mode == SERIAL else self._pipelined(chunk, target)
        if self._failures or len(self._acks.times) != LAYERS:
            raise RuntimeError(f"Decode refused: {self._failures[:1]}; {len(self._acks.times)} layers acknowledged")
        return times

    def _serial(self, chunk: EndpointChunk, target: Target) -> ChunkTimes:
        publish, wait = self._publisher.publish, self._publisher.wait_writable
        begins = []
        p_cpu = d_cpu = 0.0
        start = time.perf_counter()
        for layer in range(LAYERS):
            begins.append(time.perf_counter())
            publish(layer, (chunk,), last_layer=layer == LAYERS - 1)
            wait(self._slots[layer], ALL_BLOCKS)
            if layer == 0:
                p_cpu, d_cpu = process_cpu_s(self._pid), process_cpu_s(target.pid)
        end = time.perf_counter()
        p_cpu, d_cpu = process_cpu_s(self._pid) - p_cpu, process_cpu_s(target.pid) - d_cpu
        return ChunkTimes(self._ack_times(begins), end - start, p_cpu, d_cpu, LAYERS - 1)

    def _pipelined(self, chunk: EndpointChunk, target: Target) -> ChunkTimes:
        publish, wait = self._publisher.publish, self._publisher.wait_writable
        p_cpu, d_cpu = process_cpu_s(self._pid), process_cpu_s(target.pid)
        begins = []
        for layer in range(LAYERS):
            begins.append(time.perf_counter())
            publish(layer, (chunk,), last_layer=layer == LAYERS - 1)
        wait(None, ALL_BLOCKS)
        end = time.perf_counter()
        p_cpu, d_cpu = process_cpu_s(self._pid) - p_cpu, process_cpu_s(target.pid) - d_cpu
        # The first layer cannot be told apart in the CPU clocks here, so it counts.
        return ChunkTimes(self._ack_times(begins), end - begins[0], p_cpu, d_cpu, LAYERS)

    def _ack_times(self, begins: list[float]) -> list[float]:
        """Acknowledgement times of all layers but the first; one connection acknowledges in order."""
        return [end - begin for begin, end in zip(begins, self._acks.times, strict=True)][1:]

    def close(self) -> None:
        """Stop the publisher and the engine."""
        self._publisher.close()
        self.engine.close()


def serve_prefill(pipe: Connection) -> None:
    """Process: one Prefill for each ("start", backend, processors), chunks on ("chunk", ...), until None."""
    anywhere = frozenset(os.sched_getaffinity(0))
    memory = CacheMemory.allocate()
    memory.stamp()
    prefill: PrefillProcess | None = None
    while (command := pipe.recv()) is not None:
        name, *arguments = command
        if name == "start":
            bind_this_thread(anywhere)
            prefill = PrefillProcess(arguments[0], memory, os.getpid(), *arguments[1:])
            pipe.send((prefill.generation, prefill.engine.session(), memory.layout()))
        elif prefill is None:
            raise RuntimeError(f"{name} before start")
        elif name == "chunk":
            pipe.send(prefill.run_chunk(*arguments))
        elif name == "stop":
            prefill.close()
            pipe.send("stopped")
        else:
            raise RuntimeError(f"unknown command {name!r}")
