"""The host pool: layout, size checks, lazy memory, sharing between processes, nothing left behind."""

import multiprocessing
import os
import signal
import time

import numpy as np
import pytest

from rd2h.errors import ConfigError, EngineError
from rd2h.offload.mapping import SharedMapping, create_file, file_identity, open_file
from rd2h.offload.pool import (
    ALIGNMENT_BYTES,
    MACHINE_RESERVE_BYTES,
    HostPoolAllocator,
    PoolLayout,
    available_memory_bytes,
    check_machine,
)

GIB = 1 << 30
MIB = 1 << 20


class Lines:
    """Broadcast between rank 0 and one follower of the same test."""

    def __init__(self):
        self.value = None

    def send(self, value):
        self.value = value
        return value

    def receive(self, _):
        return self.value


def pair(num_bytes):
    """The same pool as rank 0 and, mapped again in this process, as seen by a child."""
    lines = Lines()
    owner = HostPoolAllocator(0, 2, lines.send).allocate(num_bytes)
    return owner, lines


def test_layout_is_aligned_and_layers_lie_at_equal_distances():
    layout = PoolLayout.plan([(128 * 1024, 128 * 128)] * 5, 37)
    assert all(offset % ALIGNMENT_BYTES == 0 for span in layout.spans for offset in (span.k_offset, span.v_offset))
    spans = [(span.k_offset, 37 * span.k_block_bytes) for span in layout.spans]
    spans += [(span.v_offset, 37 * span.v_block_bytes) for span in layout.spans]
    spans.sort()
    ends = [offset + length for offset, length in spans]
    assert all(end <= begin for end, (begin, _) in zip(ends, spans[1:], strict=False))
    assert ends[-1] <= layout.num_bytes
    k = [span.k_offset for span in layout.spans]
    v = [span.v_offset for span in layout.spans]
    assert set(np.diff(k)) == set(np.diff(v))
    assert len(set(np.diff(k))) == 1


def test_offsets_beyond_32_bits():
    layout = PoolLayout.plan([(128 * 1024, 128 * 128)] * 61, 20_000)
    assert layout.spans[-1].v_offset > 2**37
    assert layout.num_bytes >= 61 * 20_000 * 128 * 1152


@pytest.mark.parametrize(("blocks", "layers"), [(0, [(1, 1)]), (5, []), (5, [(1, 0)])])
def test_an_empty_pool_is_refused(blocks, layers):
    with pytest.raises(ConfigError):
        PoolLayout.plan(layers, blocks)


def test_the_machine_must_hold_it():
    check_machine(GIB, GIB + MACHINE_RESERVE_BYTES)
    with pytest.raises(ConfigError) as raised:
        HostPoolAllocator(available_bytes=lambda: 3 * GIB).allocate(4 * GIB)
    assert f"needs {4 * GIB} bytes" in str(raised.value)
    assert f"has {3 * GIB} bytes" in str(raised.value)


def test_the_real_machine_is_asked():
    assert MIB < available_memory_bytes() < 1 << 50
    with pytest.raises(ConfigError, match="this machine has"):
        HostPoolAllocator().allocate(1 << 50)


def machine(tmp_path, cgroup, files):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\n")
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("", {}, 8 * GIB),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/b/memory.current": "5\n"}, 8 * GIB),
        ("0::/a/b\n", {"a/memory.max": f"{4 * GIB}\n", "a/memory.current": f"{GIB}\n"}, 3 * GIB),
        ("0::/a\n", {"a/memory.max": "10\n", "a/memory.current": "20\n"}, 0),
        ("0::/\n", {"memory.max": f"{2 * GIB}\n", "memory.current": "0\n"}, 2 * GIB),
        (
            "3:memory:/c\n2:cpu,cpuacct:/c\n",
            {"memory/c/memory.limit_in_bytes": f"{GIB}\n", "memory/c/memory.usage_in_bytes": "24\n"},
            GIB - 24,
        ),
        (  # what the group has read from files, such as the model's weights, is given up as soon as memory is wanted
            "0::/a\n",
            {
                "a/memory.max": f"{4 * GIB}\n",
                "a/memory.current": f"{4 * GIB}\n",
                "a/memory.stat": f"anon {GIB}\nfile {3 * GIB}\ninactive_file {2 * GIB}\nactive_file {GIB}\n",
            },
            2 * GIB,
        ),
        (
            "3:memory:/c\n",
            {
                "memory/c/memory.limit_in_bytes": f"{4 * GIB}\n",
                "memory/c/memory.usage_in_bytes": f"{3 * GIB}\n",
                "memory/c/memory.stat": f"inactive_file 0\ntotal_inactive_file {2 * GIB}\n",
            },
            3 * GIB,
        ),
    ],
)
def test_control_groups_bound_the_memory(tmp_path, cgroup, files, expected):
    assert available_memory_bytes(machine(tmp_path, cgroup, files)) == expected


def test_180_gib_are_reserved_at_once_and_cost_nothing():
    started = time.perf_counter()
    pool = HostPoolAllocator(available_bytes=lambda: 1 << 50).allocate(180 * GIB)
    try:
        assert time.perf_counter() - started < 5.0
        assert pool.touched_bytes() == 0
        pool.array[179 * GIB] = 7
        pool.array[5] = 9
        assert 0 < pool.touched_bytes() <= 4 * MIB
        assert (pool.array[179 * GIB], pool.array[5], pool.array[6]) == (7, 9, 0)
    finally:
        pool.close()


def test_close_gives_memory_back_and_late_readers_survive():
    pool = HostPoolAllocator().allocate(16 * MIB)
    late = pool.array[:MIB]
    late[:] = 1
    pool.close()
    pool.close()
    assert late.sum() == 0
    assert pool.array is None


def test_the_mapping_ends_with_its_last_view():
    pool = HostPoolAllocator().allocate(16 * MIB)
    base, view = pool.base, pool.array[3:5]
    pool.close()
    assert mapped(base)
    del view
    assert not mapped(base)


def mapped(address, pid="self"):
    with open(f"/proc/{pid}/maps", encoding="ascii") as maps:
        return any(int(line.split("-")[0], 16) == address for line in maps)


def test_no_name_is_left_anywhere():
    pool = HostPoolAllocator().allocate(16 * MIB)
    assert not [name for name in os.listdir("/dev/shm") if "rd2h" in name]
    with open("/proc/self/maps", encoding="ascii") as maps:
        assert any("memfd:rd2h-host-pool (deleted)" in line for line in maps)
    pool.close()


def test_the_size_is_sealed():
    descriptor = create_file("sealed", MIB)
    for size in (0, 2 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    os.close(descriptor)


def test_a_reused_descriptor_number_is_noticed():
    descriptor, other = create_file("one", MIB), create_file("two", MIB)
    try:
        opened = open_file(os.getpid(), descriptor, file_identity(descriptor), MIB)
        assert file_identity(opened) == file_identity(descriptor)
        os.close(opened)
        with pytest.raises(EngineError, match="is not the host pool of rank 0"):
            open_file(os.getpid(), other, file_identity(descriptor), MIB)
        with pytest.raises(EngineError, match="is not the host pool of rank 0"):
            open_file(os.getpid(), descriptor, file_identity(descriptor), 2 * MIB)
        with pytest.raises(EngineError, match="must share user and PID namespace"):
            open_file(os.getpid(), 9999, file_identity(descriptor), MIB)
    finally:
        os.close(descriptor)
        os.close(other)


def test_an_occupied_address_is_an_error_not_an_overwrite():
    descriptor = create_file("pool", MIB)
    first = SharedMapping.anywhere(descriptor, MIB)
    with pytest.raises(EngineError, match="cannot map"):
        SharedMapping(descriptor, MIB, first.address)
    os.close(descriptor)


def test_rank_0_tells_why_it_failed():
    lines = Lines()
    with pytest.raises(ConfigError):
        HostPoolAllocator(0, 2, lines.send, lambda: 0).allocate(MIB)
    with pytest.raises(EngineError, match="rank 0 could not make the host pool: the host pool needs"):
        HostPoolAllocator(1, 2, lines.receive).allocate(MIB)


def test_rank_0_tells_of_whatever_went_wrong():
    def unreadable():
        raise OSError("cannot read /proc/meminfo")

    lines = Lines()
    with pytest.raises(OSError, match="meminfo"):
        HostPoolAllocator(0, 2, lines.send, unreadable).allocate(MIB)
    with pytest.raises(EngineError, match="rank 0 could not make the host pool: cannot read /proc/meminfo"):
        HostPoolAllocator(1, 2, lines.receive).allocate(MIB)


def follow(offer, num_bytes, connection):
    pool = HostPoolAllocator(1, 2, lambda _: offer).allocate(num_bytes)
    connection.send((pool.base, bytes(pool.array[:4])))
    connection.recv()
    pool.array[4:8] = (5, 6, 7, 8)
    connection.send(pool.touched_bytes())
    connection.recv()
    pool.close()
    connection.send("closed")
    connection.recv()


@pytest.fixture
def follower():
    """A process that shares a pool with this one."""
    owner, lines = pair(32 * MIB)
    owner.array[:4] = (1, 2, 3, 4)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=follow, args=(lines.value, 32 * MIB, theirs))
    process.start()
    yield owner, ours, process
    ours.close()
    if process.is_alive():
        process.kill()
    process.join(10)
    owner.close()


def test_two_processes_share_it_at_the_same_address(follower):
    owner, line, _ = follower
    assert line.poll(30)
    assert line.recv() == (owner.base, b"\1\2\3\4")
    line.send("write")
    assert line.recv() == owner.touched_bytes() > 0
    assert owner.array[4:8].tolist() == [5, 6, 7, 8]
    line.send("close")
    assert line.recv() == "closed"
    assert owner.array[:8].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_killed_rank_leaves_the_pool_to_the_others(follower):
    owner, line, process = follower
    assert line.poll(30)
    line.recv()
    os.kill(process.pid, signal.SIGKILL)
    process.join(10)
    assert owner.array[:4].tolist() == [1, 2, 3, 4]
    owner.array[:] = 1
    owner.close()
    assert owner.touched_bytes() == 0
