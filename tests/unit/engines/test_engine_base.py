"""The engine contract's value types."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rd2h.engines import (
    BACKENDS,
    EngineRole,
    HostOptions,
    MemfabricOptions,
    MemoryRegion,
    NullOptions,
    check_descriptors,
    create_engine,
    merge_regions,
)
from rd2h.engines.lifecycle import TRANSITIONS, EngineState, Lifecycle
from rd2h.errors import ConfigError, EngineError, StateError

regions = st.lists(st.builds(MemoryRegion, st.integers(1, 60), st.integers(1, 12)), max_size=12)


def bytes_of(found):
    return {addr for region in found for addr in range(region.addr, region.end)}


@given(regions, st.booleans())
def test_merged_regions_cover_the_same_bytes_once(given_regions, join):
    merged = merge_regions(given_regions, join_adjacent=join)
    assert bytes_of(merged) == bytes_of(given_regions)
    assert sum(region.length for region in merged) == len(bytes_of(given_regions))
    for left, right in itertools.pairwise(merged):
        assert left.end < right.addr if join else left.end <= right.addr


def test_touching_regions_stay_apart_unless_joined():
    touching = [MemoryRegion(200, 100), MemoryRegion(100, 100)]
    assert merge_regions(touching) == (MemoryRegion(100, 100), MemoryRegion(200, 100))
    assert merge_regions(touching, join_adjacent=True) == (MemoryRegion(100, 200),)


def test_merging_keeps_64_bit_ends():
    top = MemoryRegion(2**64 - 4096, 4096)
    assert top.end == 2**64
    assert merge_regions([top, MemoryRegion(2**64 - 8192, 8192)]) == (MemoryRegion(2**64 - 8192, 8192),)


@pytest.mark.parametrize(("addr", "length"), [(0, 1), (-1, 1), (2**64, 1), (1, 0), (1, -1), (2**64 - 1, 2), (1, 2**64)])
def test_impossible_regions_are_refused(addr, length):
    with pytest.raises(EngineError, match="out of range"):
        MemoryRegion(addr, length)


def test_descriptors_must_be_three_equal_uint64_vectors():
    good = np.zeros(3, np.uint64)
    assert check_descriptors(good, good, good) == 3
    with pytest.raises(EngineError, match=r"peer has dtype int64 .* expected uint64"):
        check_descriptors(good, good.astype(np.int64), good)
    with pytest.raises(EngineError, match="2 dimensions"):
        check_descriptors(good, good, good.reshape(1, 3))
    with pytest.raises(EngineError, match="local 3, peer 3, lengths 2"):
        check_descriptors(good, good, good[:2])


def test_factory_makes_every_backend_and_names_them_for_a_wrong_one():
    options = {"memfabric": MemfabricOptions("10.0.0.1", 0), "host": HostOptions(), "null": NullOptions()}
    for backend in BACKENDS:
        assert create_engine(backend, options[backend]).backend == backend
    assert create_engine("host").backend == "host"
    with pytest.raises(
        ConfigError, match=r"transfer_backend='mooncake' is not allowed.*'memfabric', 'host', 'null'"
    ) as e:
        create_engine("mooncake")
    assert e.value.key == "transfer_backend"
    with pytest.raises(ConfigError, match="engine memfabric needs MemfabricOptions, got NoneType"):
        create_engine("memfabric")
    with pytest.raises(ConfigError, match="engine host needs HostOptions, got NullOptions"):
        create_engine("host", NullOptions())


def test_every_state_has_transitions_and_only_closed_is_final():
    assert set(TRANSITIONS) == set(EngineState)
    assert [state for state, targets in TRANSITIONS.items() if not targets] == [EngineState.CLOSED]


def test_a_failed_start_leaves_an_engine_that_can_only_be_closed():
    life = Lifecycle("x")
    with pytest.raises(RuntimeError, match="no driver"), life.starting(EngineRole.DECODE):
        raise RuntimeError("no driver")
    assert life.state is EngineState.FAILED
    assert not life.begin_read()
    with pytest.raises(StateError, match="cannot register memory while failed"):
        life.require_ready("register memory")
    with life.closing(1) as was_ready:
        assert not was_ready
    assert life.state is EngineState.CLOSED
    with pytest.raises(StateError, match="cannot go from closed to starting"), life.starting(EngineRole.DECODE):
        pass


def test_close_waits_for_reads_and_says_how_many_are_left():
    life = Lifecycle("x")
    with life.starting(EngineRole.DECODE):
        pass
    assert life.begin_read()
    with pytest.raises(EngineError, match="1 reads still running"), life.closing(0.01):
        pytest.fail("the body must not run while a read is running")
    assert life.state is EngineState.READY
    life.end_read()
    with life.closing(0.01) as was_ready:
        assert was_ready
        assert not life.begin_read()
    assert life.state is EngineState.CLOSED
    with life.closing(0.01) as was_ready:
        assert not was_ready
