"""Bytes between two real processes: exact where a descriptor says so, untouched everywhere else."""

import mmap
import time

import numpy as np
import pytest

from rd2h.engines import EngineRole, create_engine
from rd2h.probing.pattern import pattern_bytes

CANARY = 0xA5
MAP_NORESERVE = 0x4000


@pytest.fixture
def engine():
    engine = create_engine("host")
    engine.initialize(EngineRole.DECODE)
    yield engine
    engine.close()


def layout(rng, count, size, longest):
    """Random places in the destination without overlap, some touching; returns starts and lengths."""
    lengths = rng.integers(0, longest, count, endpoint=True)
    gaps = rng.choice([0, 0, 1, 7, 64], count)
    starts = np.cumsum(lengths + gaps) - lengths
    assert starts[-1] + lengths[-1] <= size
    return starts, lengths


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("count", "longest"), [(1, 100_000), (96, 9000), (1022, 700), (1023, 700), (3100, 300)])
def test_random_descriptors_are_exact_and_canaries_survive(engine, start_source, seed, count, longest):
    rng = np.random.default_rng([seed, count])
    size = count * (longest + 64) + 4096
    source = start_source(size)
    target = np.full(size, CANARY, np.uint8)
    expected = target.copy()
    starts, lengths = layout(rng, count, size, longest)
    places = rng.integers(0, size - lengths, endpoint=True)
    places[1::3] = (places + lengths)[:-1:3][: places[1::3].size]  # some sources follow each other directly
    places = np.minimum(places, size - lengths)
    order = rng.permutation(count)
    arrays = [
        (values[order].astype(np.uint64) + np.uint64(base))
        for values, base in ((starts, target.ctypes.data), (places, source.addr), (lengths, 0))
    ]
    result = engine.batch_transfer_sync_read(source.session, *arrays)
    assert result.ok, result.message
    whole = pattern_bytes(source.seed, 0, size)
    for start, place, length in zip(starts, places, lengths, strict=True):
        expected[start : start + length] = whole[place : place + length]
    assert np.array_equal(target, expected)


def test_offsets_beyond_32_bits(engine, start_source):
    page = 4096
    size = 9 << 30  # reserved, not touched: only the filled pages exist
    far = [(0, page), ((4 << 30) - 100, 300), ((8 << 30) + 12345, page)]
    source = start_source(size, filled=far)
    target = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    view = np.frombuffer(target, np.uint8)
    base = view.ctypes.data
    columns = ([base + start for start, _ in far], [source.addr + start for start, _ in far], [n for _, n in far])
    result = engine.batch_transfer_sync_read(source.session, *(np.array(column, np.uint64) for column in columns))
    assert result.ok, result.message
    for start, length in far:
        assert np.array_equal(view[start : start + length], pattern_bytes(source.seed, start, length))
        assert not view[start + length : start + length + 64].any()


def test_a_batch_of_more_bytes_than_the_kernel_moves_in_one_call(engine, start_source):
    # The bound is 2 GiB - 4 KiB. The source's pages are untouched except the last ones, and every piece goes to the
    # same place, so no memory of that size is needed.
    size = (2 << 30) + (1 << 20)
    source = start_source(size, filled=[(size - 5000, 5000)])
    piece = 64 << 20
    target = np.full(piece, CANARY, np.uint8)
    starts = np.arange(0, size, piece, dtype=np.uint64)
    lengths = np.minimum(np.uint64(piece), np.uint64(size) - starts)
    local = np.full(starts.size, target.ctypes.data, np.uint64)
    result = engine.batch_transfer_sync_read(source.session, local, starts + np.uint64(source.addr), lengths)
    assert result.ok, result.message
    last = int(lengths[-1])
    assert np.array_equal(target[last - 5000 : last], pattern_bytes(source.seed, size - 5000, 5000))
    assert not target[: last - 5000].any()
    assert not target[last:].any()


def test_overhead_and_throughput_are_reported(engine, start_source, capsys):
    size = 48 << 20
    source = start_source(size)
    target = np.zeros(size, np.uint8)
    engine.open_session(source.session)
    spare = np.zeros(size, np.uint8)

    def median_us(count, length, repeats=50):
        starts = np.arange(count, dtype=np.uint64) * np.uint64(size // count)
        args = (
            starts + np.uint64(target.ctypes.data),
            starts + np.uint64(source.addr),
            np.full(count, length, np.uint64),
        )
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            result = engine.batch_transfer_sync_read(source.session, *args)
            times.append(time.perf_counter() - started)
            assert result.ok, result.message
        return sorted(times)[repeats // 2] * 1e6

    started = time.perf_counter()
    np.copyto(spare, target)
    copy_us = (time.perf_counter() - started) * 1e6
    with capsys.disabled():
        print(f"\nmemcpy {size / copy_us / 1e3:.1f} GB/s")
        for count, length in ((1, 1), (96, 1), (1536, 1), (96, 131072), (1536, 16384)):
            found_us = median_us(count, length)
            print(f"{count} x {length} B: {found_us:.0f} us, {count * length / found_us / 1e3:.2f} GB/s")
    for index in (0, 1, 1535):
        start = index * (size // 1536)
        assert np.array_equal(target[start : start + 16384], pattern_bytes(source.seed, start, 16384))
