"""One tensor-parallel rank of an offloading Decode, as a process: manager, pool, indexer caches and a real puller.

Commands come over a pipe as (name, *arguments); every command is answered.
"""

import threading
import traceback

import numpy as np
import torch

from rd2h.children import ChildSpec
from rd2h.decode.options import PullerOptions
from rd2h.decode.puller import Puller
from rd2h.engines import EngineRole, create_engine
from rd2h.offload.config import SparseOffloadConfig
from rd2h.offload.destination import find_manager, offload_destination, offload_layout
from rd2h.offload.manager import OffloadLayer, SparseKVOffloadManager
from rd2h.offload.pool import HostPoolAllocator
from rd2h.stats import TransferStats
from rd2h.timeline import Timeline

LAYERS, BLOCKS, BLOCK, RANK, ROPE, INDEX = 3, 48, 4, 32, 8, 16
ROWS, TOPK, CAPACITY = 2, 8, 12
CANARY = 0xA5
GENERATION = 77


def layer_name(layer):
    return f"model.layers.{layer}.self_attn.attn"


class Rank:
    def __init__(self, pipe, tp_rank, tp_size, p_generation):
        def broadcast(value):
            if tp_rank == 0:
                pipe.send(("broadcast", value))
                return value
            return pipe.recv()

        def barrier():
            pipe.send(("barrier", None))
            pipe.recv()

        self.manager = SparseKVOffloadManager(
            SparseOffloadConfig(enabled=True, topk_buffer_size=CAPACITY, dram_size_per_dp_gib=1),
            [OffloadLayer(layer_name(layer), RANK, ROPE) for layer in range(LAYERS)],
            torch.float32,
            BLOCKS,
            BLOCK,
            ROWS,
            TOPK,
            tp_rank,
            tp_size,
            HostPoolAllocator(tp_rank, tp_size, broadcast),
            barrier,
        )
        if tp_rank == 0:
            self.manager._pool.array[:] = CANARY
        self.indexers = {
            f"{layer_name(layer)}.indexer.k_cache": torch.zeros(BLOCKS, BLOCK, INDEX) for layer in range(LAYERS)
        }
        self.stats = TransferStats()
        self.engine = create_engine("host")
        self.engine.initialize(EngineRole.DECODE)
        layout = offload_layout(find_manager(), self.indexers, BLOCKS, LAYERS)
        self.puller = Puller(
            PullerOptions("127.0.0.1", 0, GENERATION, b"", tp_size),
            offload_destination(layout, tp_rank, tp_size),
            self.engine,
            self.stats,
            Timeline("D", None),
        )
        self.puller.start()
        self.puller.trust(frozenset({p_generation}))

    def port(self):
        return self.puller.port

    def add(self, children):
        self.puller.add(
            [
                ChildSpec(token, name, name, np.array(main), 0, np.array(indexer), 0)
                for token, name, main, indexer in children
            ]
        )

    def finished(self):
        return [(child.request_id, child.outcome.value, child.reason) for child in self.puller.take_finished()]

    def indexer_bytes(self):
        return [tensor.numpy().copy() for tensor in self.indexers.values()]

    def pool_bytes(self):
        """The whole pool as this rank sees it."""
        return self.manager._pool.array.copy()

    def bases(self):
        return self.manager.gvas_k_bases, self.manager.gvas_v_bases

    def counters(self):
        return self.stats.take()

    def gather(self, layer, topk, keys, prefix, tables):
        slots = self.manager.gather(layer_name(layer), topk, keys, prefix, tables)
        k, v = self.manager.hot_buffers(layer_name(layer))
        rows = torch.arange(len(topk))[:, None]
        return k[rows, slots.long()].numpy(), v[rows, slots.long()].numpy()

    def append(self, layer, k, v, slots):
        self.manager.append(layer_name(layer), torch.from_numpy(k), torch.from_numpy(v), slots)

    def close(self):
        self.puller.close()
        self.engine.close()
        self.manager.close()
        return threading.active_count()


def serve(pipe, *arguments):
    try:
        rank = Rank(pipe, *arguments)
        pipe.send(("started", rank.port()))
        while (command := pipe.recv()) is not None:
            name, *values = command
            pipe.send(("answer", getattr(rank, name)(*values)))
    except EOFError:
        return
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
        raise
