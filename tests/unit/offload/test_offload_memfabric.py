"""MemFabric's pool and copies: against a stand-in, whose signatures are those of the installed wheel."""

import ctypes
import inspect
import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rd2h.errors import ConfigError, EngineError, StateError, TransferError
from rd2h.offload.copier import RowMemory
from rd2h.offload.memfabric import MemfabricPoolAllocator, SparseCopier
from rd2h.offload.pool import ALIGNMENT_BYTES

GIB = 1 << 30
MIB = 1 << 20
FIELDS = ("device_id", "reserve_size", "alloc_size", "world_size", "rank_id", "scene", "store_url")


class StandIn:
    """``memfabric_hybrid.offload`` in ordinary memory; its calls have the names and parameters of the wheel's."""

    def __init__(self, skew=4096, code=0, memory=True):
        self.skew, self.code, self.memory = skew, code, memory
        self.calls, self.blocks = [], {}
        self.Scene = SimpleNamespace(LOCAL="local", SHARED="shared")
        self.OffloadConfig = lambda: SimpleNamespace(**dict.fromkeys(FIELDS))

    def initialize(self, config):
        self.calls.append(("initialize", config))
        return self.code

    def uninitialize(self):
        self.calls.append(("uninitialize",))

    def malloc(self, size, flags=0):
        self.calls.append(("malloc", size))
        if not self.memory:
            return 0
        buffer = (ctypes.c_uint8 * (size + 2 * ALIGNMENT_BYTES))()
        pointer = -(-ctypes.addressof(buffer) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES + self.skew
        self.blocks[pointer] = buffer
        return pointer

    def free(self, ptr, flags=0):
        self.calls.append(("free", ptr))
        del self.blocks[ptr]

    def sparse_copy(self, srcPtrs, dstPtrs, lenPtrs, sizePtr, deviceId):  # noqa: N803
        self.calls.append(("sparse_copy", deviceId))
        for source, target, length in zip(*(t.tolist() for t in (srcPtrs, dstPtrs, lenPtrs)), strict=True):
            ctypes.memmove(target, source, length)
        assert sizePtr.tolist() == [len(srcPtrs)]
        return self.code


REPORT = """
import inspect, json
from memfabric_hybrid import offload
config = offload.OffloadConfig()
print("REPORT" + json.dumps({
    "docs": {name: getattr(offload, name).__doc__ for name in ("initialize", "uninitialize", "malloc", "free")},
    "sparse_copy": list(inspect.signature(offload.sparse_copy).parameters),
    "fields": [name for name in dir(config) if not name.startswith("_")],
    "scenes": list(offload.Scene.__members__),
}))
"""


@pytest.fixture(scope="module")
def wheel():
    done = subprocess.run([sys.executable, "-c", REPORT], capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout.partition("REPORT")[2])


def test_the_stand_in_has_the_signatures_of_the_wheel(wheel):
    for name, doc in wheel["docs"].items():
        signature = doc.strip().splitlines()[0]
        inside = signature[signature.index("(") + 1 : signature.rindex(") ->")]
        theirs = [part.split(":")[0].strip() for part in inside.split(", ") if part]
        assert list(inspect.signature(getattr(StandIn(), name)).parameters) == theirs, signature
    assert list(inspect.signature(StandIn().sparse_copy).parameters) == wheel["sparse_copy"]
    assert wheel["docs"]["malloc"].strip().splitlines()[0].endswith("-> int")
    assert wheel["docs"]["initialize"].strip().splitlines()[0].endswith("-> int")


def test_the_fields_that_we_set_exist(wheel):
    assert set(FIELDS) <= set(wheel["fields"])
    assert "size" not in wheel["fields"]
    assert wheel["scenes"] == ["LOCAL", "SHARED"]


def allocate(offload, rank=0, lines=None, available=64 * GIB, **settings):
    lines = [] if lines is None else lines

    def broadcast(value):
        if rank == 0:
            lines.append(value)
            return value
        return lines.pop(0)

    allocator = MemfabricPoolAllocator(
        rank, 2, 5 + rank, broadcast, offload=offload, available_bytes=lambda: available, **settings
    )
    return allocator.allocate(8 * MIB)


@pytest.mark.parametrize("skew", [0, 1, 4096, ALIGNMENT_BYTES - 1])
def test_rank_0_backs_the_memory_at_an_aligned_address(skew):
    offload = StandIn(skew)
    pool = allocate(offload, store_url="tcp://10.0.0.1:8500")
    config = offload.calls[0][1]
    assert (config.device_id, config.world_size, config.rank_id, config.scene) == (5, 2, 0, "shared")
    assert (config.reserve_size, config.alloc_size) == (GIB, GIB)
    assert config.store_url == "tcp://10.0.0.1:8500"
    assert pool.base % ALIGNMENT_BYTES == 0
    pool.array[:] = 3
    assert len(pool.array) == 8 * MIB
    pool.close()
    pool.close()
    assert [call[0] for call in offload.calls] == ["initialize", "malloc", "free", "uninitialize"]
    assert offload.blocks == {}


def test_other_ranks_reserve_the_same_range_and_back_nothing():
    lines, first, second = [], StandIn(), StandIn()
    pool = allocate(first, 0, lines)
    other = allocate(second, 1, lines)
    assert other.base == pool.base
    assert other.array is None
    config = second.calls[0][1]
    assert (config.device_id, config.rank_id, config.reserve_size, config.alloc_size) == (6, 1, GIB, 0)
    assert config.store_url is None
    other.close()
    assert [call[0] for call in second.calls] == ["initialize", "uninitialize"]
    pool.close()


def test_too_little_memory_fails_on_every_rank_before_they_wait_for_each_other():
    lines, first, second = [], StandIn(), StandIn()
    with pytest.raises(ConfigError, match=r"needs 1073741824 bytes .* this machine has 1000 bytes"):
        allocate(first, 0, lines, available=1000)
    with pytest.raises(EngineError, match="rank 0 could not make the host pool: the host pool needs"):
        allocate(second, 1, lines)
    assert first.calls == second.calls == []


def test_results_are_checked():
    with pytest.raises(EngineError, match=r"offload.initialize failed, ret=-7 \(rank 0 of 2, device 5"):
        allocate(StandIn(code=-7))
    lines, first = [], StandIn(memory=False)
    with pytest.raises(EngineError, match="gave no memory"):
        allocate(first, 0, lines)
    assert first.calls[-1] == ("uninitialize",)
    with pytest.raises(EngineError, match="rank 0 could not allocate"):
        allocate(StandIn(), 1, lines)


def test_a_rank_that_cannot_initialize_is_told_of_and_still_hears_rank_0():
    lines = []
    with pytest.raises(EngineError, match=r"ret=-7 \(rank 0 of 2"):
        allocate(StandIn(code=-7), 0, lines)
    told = len(lines)
    with pytest.raises(EngineError, match="rank 0 could not allocate"):
        allocate(StandIn(), 1, lines)
    assert told == 2
    lines.clear()
    allocate(StandIn(), 0, lines).close()
    with pytest.raises(EngineError, match=r"ret=-7 \(rank 1 of 2"):
        allocate(StandIn(code=-7), 1, lines)
    assert lines == []


@pytest.fixture
def memories():
    rng = np.random.default_rng(3)
    k, v = (rng.integers(0, 255, (16, width), np.uint8) for width in (32, 8))
    hot_k, hot_v = np.zeros((8, 32), np.uint8), np.zeros((8, 8), np.uint8)
    pairs = [
        (RowMemory.over(hot, hot.shape[1]), RowMemory.over(pool, pool.shape[1]))
        for hot, pool in ((hot_k, k), (hot_v, v))
    ]
    return pairs, (k, v, hot_k, hot_v)


def test_sparse_copy_moves_the_rows(memories):
    pairs, (k, v, hot_k, hot_v) = memories
    offload, device = StandIn(), torch.device("cpu")
    moved = SparseCopier(device, 8, offload).copy(pairs, np.array([1, 7]), np.array([15, 2]))
    assert moved == 2 * 40
    assert np.array_equal(hot_k[[1, 7]], k[[15, 2]])
    assert np.array_equal(hot_v[[1, 7]], v[[15, 2]])
    assert not hot_k[[0, 2, 3, 4, 5, 6]].any()
    assert offload.calls == [("sparse_copy", device)]


def test_a_failed_or_impossible_sparse_copy_raises(memories):
    pairs, _ = memories
    copier = SparseCopier(torch.device("cpu"), 2, StandIn(code=5))
    assert copier.copy(pairs, np.zeros(0, np.int64), np.zeros(0, np.int64)) == 0
    with pytest.raises(TransferError, match="sparse_copy failed, ret=5, 2 rows") as raised:
        copier.copy(pairs, np.array([0]), np.array([0]))
    assert raised.value.code == 5
    with pytest.raises(StateError, match=r"source rows 16..16 exceed the 16 rows"):
        copier.copy(pairs, np.array([0]), np.array([16]))
    with pytest.raises(TransferError, match="3 rows exceeds the bound of 2"):
        copier.copy(pairs, np.array([0, 1, 2]), np.array([0, 1, 2]))
