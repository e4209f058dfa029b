"""A Decode of several ranks in processes of their own, and the Prefill ranks that feed it, in the test's process."""

import multiprocessing
import secrets
import time
from dataclasses import dataclass

import numpy as np
from offload_rank_process import BLOCK, BLOCKS, GENERATION, INDEX, LAYERS, RANK, ROPE, layer_name, serve

from rd2h.engines import EngineRole, MemoryRegion, create_engine
from rd2h.gates import ALL_BLOCKS, ChunkBlocks, Component, Slot
from rd2h.layout import CacheLayout, LayerLayout, TensorLayout, encode_layer_map
from rd2h.prefill.endpoint import EndpointChunk, EndpointKey
from rd2h.prefill.options import PublisherOptions, SourceMemory
from rd2h.prefill.publisher import Publisher
from rd2h.stats import TransferStats
from rd2h.wire import PeerInfo, ReadRequest, encode_read_requests

DEADLINE_S = 40.0
WIDTHS = (RANK, ROPE, INDEX)


class DecodeRanks:
    """The processes; lines of broadcast and barrier run through the test."""

    def __init__(self, size, p_generation):
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes, self.barriers = [], [], 0
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, rank, size, p_generation), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self.ports = self._relay("started")

    def _relay(self, wanted):
        """Answer broadcasts and barriers until every rank has sent ``wanted``."""
        results, waiting = {}, []
        deadline = time.monotonic() + DEADLINE_S
        while len(results) < len(self.pipes):
            for rank, pipe in enumerate(self.pipes):
                if rank in results or not pipe.poll(0.01):
                    assert time.monotonic() < deadline, f"rank {rank} of {len(self.pipes)} does not answer"
                    continue
                kind, value = pipe.recv()
                assert kind != "error", value
                if kind == "broadcast":
                    for other in self.pipes[1:]:
                        other.send(value)
                elif kind == "barrier":
                    waiting.append(pipe)
                    if len(waiting) == len(self.pipes):
                        self.barriers += 1
                        for each in waiting:
                            each.send(None)
                        waiting = []
                else:
                    assert kind == wanted, (kind, value)
                    results[rank] = value
        return [results[rank] for rank in range(len(self.pipes))]

    def all(self, *command):
        """The same command on every rank; their answers."""
        for pipe in self.pipes:
            pipe.send(command)
        return self._relay("answer")

    def one(self, rank, *command):
        """A command on one rank (it must not need the others)."""
        self.pipes[rank].send(command)
        kind, value = self.pipes[rank].recv()
        assert kind == "answer", value
        return value

    def stop(self):
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join(5)


@dataclass
class Chunk:
    """Blocks [start, start + len(blocks)) of one request on Prefill."""

    token: bytes
    name: str
    blocks: list
    start: int
    last: bool


class PrefillRanks:
    """Replicated main and indexer caches of ``p_tp`` ranks, each with engine and publisher."""

    def __init__(self, p_tp, ports):
        self.p_tp, self.ports = p_tp, ports
        self.generation = secrets.randbits(62) | 1
        rng = np.random.default_rng(5)
        self.tensors = [
            [rng.standard_normal((BLOCKS, BLOCK, width), np.float32) for width in WIDTHS] for _ in range(LAYERS)
        ]
        layers = []
        for layer, arrays in enumerate(self.tensors):
            k, v, indexer = (TensorLayout(a.ctypes.data, a[0].nbytes, BLOCKS) for a in arrays)
            layers.append(LayerLayout(layer_name(layer), (k, v), indexer))
        self.layout = CacheLayout(tuple(layers))
        self.failures, self.engines, self.publishers = [], [], []

    def start(self):
        tensors = [tensor for layer in self.layout.layers for tensor in layer.tensors]
        regions = [MemoryRegion(t.base_addr, t.end_addr - t.base_addr) for t in tensors]
        slots = [(Slot(Component.MAIN, i), Slot(Component.INDEXER, i)) for i in range(LAYERS)]
        for rank in range(self.p_tp):
            engine = create_engine("host")
            engine.initialize(EngineRole.PREFILL)
            engine.register_memory(regions)
            memory = SourceMemory(
                engine.session(),
                encode_layer_map(self.layout),
                [layer.name for layer in self.layout.layers],
                slots,
                PeerInfo(1, self.generation, b"", self.p_tp, rank),
            )
            publisher = Publisher(memory, PublisherOptions(), TransferStats(), self.failures.append)
            publisher.start()
            self.engines.append(engine)
            self.publishers.append(publisher)

    def publish(self, chunks, layers=range(LAYERS), ranks=None):
        """Every contributor publishes the layers of ``chunks`` to its Decode rank; returns when all have answered."""
        ratio = self.p_tp // len(self.ports)
        requests = [
            ReadRequest(c.name, np.array(c.blocks), np.array(c.blocks), c.start, c.start, c.token) for c in chunks
        ]
        blocks = frozenset(block for chunk in chunks for block in chunk.blocks)
        done = [chunk for chunk in chunks if chunk.last]
        for rank in range(self.p_tp) if ranks is None else ranks:
            chunk = EndpointChunk(
                EndpointKey("127.0.0.1", self.ports[rank // ratio], GENERATION),
                encode_read_requests(requests),
                ChunkBlocks(blocks, blocks),
                tuple(c.token for c in chunks),
                tuple(c.name for c in done),
                tuple(c.token for c in done),
                rank % ratio,
                ratio,
            )
            for layer in layers:
                self.publishers[rank].publish(layer, [chunk], last_layer=layer == LAYERS - 1)
            self.publishers[rank].wait_writable(None, ALL_BLOCKS)

    def stop(self):
        for part in (*self.publishers, *self.engines):
            part.close()
