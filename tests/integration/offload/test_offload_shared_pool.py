"""A pool that the processes of all Decode ranks share, filled by their pullers with disjoint shares of main."""

import os
import secrets
import signal
import time

import numpy as np
import pytest
from offload_pair import Chunk
from offload_rank_process import BLOCK, BLOCKS, CANARY, INDEX, LAYERS, RANK, ROPE, TOPK

DEADLINE_S = 30.0


class Child:
    """A request with a prompt of ``blocks`` blocks: where they lie on Prefill and on Decode."""

    def __init__(self, name, blocks, taken_p, taken_d):
        self.name, self.token = name, secrets.token_bytes(16)
        self.source, taken_p[:] = taken_p[:blocks], taken_p[blocks:]
        self.target, taken_d[:] = taken_d[:blocks], taken_d[blocks:]

    def chunk(self, start, end):
        return Chunk(self.token, self.name, self.source[start:end], start, end == len(self.source))

    @property
    def spec(self):
        return self.token, self.name, self.target, self.target


@pytest.fixture
def children():
    rng = np.random.default_rng(11)
    taken_p, taken_d = rng.permutation(BLOCKS).tolist(), rng.permutation(BLOCKS).tolist()
    return [Child("long", 17, taken_p, taken_d), Child("short", 1, taken_p, taken_d)]


def finish(decode, count):
    """Every rank's ends, ``count`` for each."""
    ends = [[] for _ in decode.pipes]
    deadline = time.monotonic() + DEADLINE_S
    while any(len(each) < count for each in ends):
        assert time.monotonic() < deadline, ends
        for each, new in zip(ends, decode.all("finished"), strict=True):
            each += new
    return ends


def layer_tensors(pool, bases, layer):
    """(K, V) of a layer as [blocks, block, width] out of the pool's bytes."""
    (k_bases, v_bases), start = bases, bases[0][0]
    tensors = []
    for base, width in ((k_bases[layer], RANK), (v_bases[layer], ROPE)):
        offset, num_bytes = base - start, BLOCKS * BLOCK * width * 4
        tensors.append(pool[offset : offset + num_bytes].view(np.float32).reshape(BLOCKS, BLOCK, width))
    return tensors


def check_pool(decode, prefill, children):
    """The pulled blocks hold Prefill's bytes; every other byte of the pool is a canary still."""
    bases = decode.one(0, "bases")
    pools = decode.all("pool_bytes")
    for pool in pools[1:]:
        assert np.array_equal(pool, pools[0])
    for layer in range(LAYERS):
        for tensor, source in zip(layer_tensors(pools[0], bases, layer), prefill.tensors[layer], strict=False):
            for child in children:
                assert np.array_equal(tensor[child.target], source[child.source]), (layer, child.name)
                tensor[child.target].fill(0)
                tensor.view(np.uint8)[child.target] = CANARY
    assert (pools[0] == CANARY).all()


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), (2, 1), (2, 2), (4, 2), (3, 3)])
def test_ranks_pull_disjoint_shares_into_one_pool(pair, children, p_tp, d_tp):
    prefill, decode = pair(p_tp, d_tp)
    assert len({str(bases) for bases in decode.all("bases")}) == 1
    decode.all("add", [child.spec for child in children])
    long, short = children
    prefill.publish([long.chunk(0, 5)])
    prefill.publish([long.chunk(5, 6), short.chunk(0, 1)])
    prefill.publish([long.chunk(6, 17)])
    for ends in finish(decode, 2):
        assert sorted(ends) == [("long", "done", ""), ("short", "done", "")]

    check_pool(decode, prefill, children)
    for indexers in decode.all("indexer_bytes"):
        for layer, tensor in enumerate(indexers):
            for child in children:
                assert np.array_equal(tensor[child.target], prefill.tensors[layer][2][child.source])
    # No byte of main was pulled twice, and each rank pulled all of the indexer.
    pulled = [counters["bytes_read"] for counters in decode.all("counters")]
    block = BLOCK * 4 * LAYERS
    assert sum(pulled) == 18 * block * (RANK + ROPE) + d_tp * 18 * block * INDEX
    assert max(pulled) - min(pulled) <= block * (RANK + ROPE) * 3


def test_every_rank_attends_to_what_the_others_pulled_and_rank_0_appended(pair, children):
    prefill, decode = pair(2, 2)
    long, short = children
    decode.all("add", [child.spec for child in children])
    prefill.publish([long.chunk(0, 17), short.chunk(0, 1)])
    finish(decode, 2)
    rng = np.random.default_rng(2)
    tables = np.zeros((2, 18), np.int32)
    tables[0, :17], tables[1, :1] = long.target, short.target
    lengths = [17 * BLOCK - 1, BLOCK - 1]
    for _ in range(3):
        # The last prompt token is computed on Decode, and here again and again: a rewrite each time.
        slots = np.array([tables[row, lengths[row] // BLOCK] * BLOCK + lengths[row] % BLOCK for row in (0, 1)])
        topk = np.full((2, TOPK), -1)
        topk[0] = np.append(rng.permutation(lengths[0])[: TOPK - 1], lengths[0])
        topk[1, :4] = rng.permutation(4)
        for layer in range(LAYERS):
            k = rng.standard_normal((2, RANK)).astype(np.float32)
            v = rng.standard_normal((2, ROPE)).astype(np.float32)
            decode.all("append", layer, k, v, slots)
            before = decode.barriers
            answers = decode.all("gather", layer, topk, np.array([1, 2], np.uint64), np.array(lengths), tables)
            assert decode.barriers == before + 1
            for got_k, got_v in answers:
                for row, child in enumerate(children):
                    for column, token in enumerate(topk[row]):
                        if token < 0:
                            continue
                        source = child.source[token // BLOCK], token % BLOCK
                        new = token == lengths[row]
                        assert np.array_equal(got_k[row, column], k[row] if new else prefill.tensors[layer][0][source])
                        assert np.array_equal(got_v[row, column], v[row] if new else prefill.tensors[layer][1][source])


def test_i6_a_request_is_ready_only_when_every_layer_has_landed_on_every_rank(pair, children):
    prefill, decode = pair(2, 2)
    long, _ = children
    decode.all("add", [long.spec])
    prefill.publish([long.chunk(0, 17)], ranks=[0])
    prefill.publish([long.chunk(0, 17)], layers=range(LAYERS - 1), ranks=[1])
    deadline = time.monotonic() + DEADLINE_S
    first = []
    while not first:
        assert time.monotonic() < deadline
        first = decode.one(0, "finished")
    assert first == [("long", "done", "")]
    assert decode.one(1, "finished") == []
    prefill.publish([long.chunk(0, 17)], layers=[LAYERS - 1], ranks=[1])
    second = []
    while not second:
        assert time.monotonic() < deadline
        second = decode.one(1, "finished")
    assert second == [("long", "done", "")]
    check_pool(decode, prefill, [long])


def test_a_killed_decode_leaves_no_memory_behind(pair):
    _, decode = pair(2, 2)
    assert any("rd2h-host-pool" in line for line in maps(decode.processes[1].pid))
    for process in decode.processes:
        os.kill(process.pid, signal.SIGKILL)
        process.join(10)
        assert process.exitcode == -signal.SIGKILL
    assert not [name for name in os.listdir("/dev/shm") if "rd2h" in name]
    # A memfd lives as long as somebody maps it or holds it open; this process does neither.
    assert not any("rd2h-host-pool" in line for line in maps("self"))


def maps(pid):
    with open(f"/proc/{pid}/maps", encoding="ascii") as lines:
        return lines.readlines()


def test_an_orderly_end_leaves_no_thread(pair):
    _, decode = pair(2, 2)
    assert decode.all("close") == [1, 1]
