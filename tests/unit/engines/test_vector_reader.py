"""The vectored reader against a simulated kernel that stops early, interrupts, refuses, and changes the source."""

import ctypes
import errno
import os
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rd2h.engines import vmread
from rd2h.engines.base import ReadCode
from rd2h.engines.proof import PROOF_BYTES, ProofPage
from rd2h.engines.vmread import DESCRIPTORS_PER_CALL, IOV_MAX, MAX_STALLS, VectorReader, explain_errno

SIZE = 1 << 16


class SimulatedKernel(VectorReader):
    """Copies inside this process, vector by vector, as process_vm_readv does, and does what the script says.

    Script entries: an int ends the call after so many bytes, ("errno", code) fails it. An empty script copies all.
    """

    def __init__(self, script=(), unmapped=range(0), on_bytes=None):
        super().__init__()
        self.script = list(script)
        self.unmapped = unmapped
        self.on_bytes = on_bytes
        self.calls = []
        self.copied = 0

    def _call(self, pid, row, rows):
        assert rows <= IOV_MAX
        self.calls.append((row, rows))
        limit = self.script.pop(0) if self.script else 1 << 62
        if isinstance(limit, tuple):
            return -limit[1]
        done = 0
        for here, there in zip(
            self._local[row : row + rows].tolist(), self._remote[row : row + rows].tolist(), strict=True
        ):
            assert here[1] == there[1]
            for offset in range(0, here[1], 512):
                size = min(512, here[1] - offset, limit - done)
                if there[0] + offset in self.unmapped or size == 0:
                    return done if done else -errno.EFAULT
                ctypes.memmove(here[0] + offset, there[0] + offset, size)
                done += size
                self.copied += size
                if self.on_bytes:
                    self.on_bytes(self.copied)
                if size < min(512, here[1] - offset):
                    return done
        return done

    def _try_byte(self, pid, addr):
        return -errno.EFAULT if addr in self.unmapped else 1


@pytest.fixture(scope="module")
def page():
    return ProofPage()


def arrays(*columns):
    return [np.array(column, dtype=np.uint64) for column in columns]


def scattered(rng, count, source, target):
    """Random descriptors without overlap in the target; returns them with the expected target."""
    cuts = sorted(rng.sample(range(SIZE), 2 * count))
    local, peer, lengths = [], [], []
    expected = np.frombuffer(bytes(target), np.uint8).copy()
    raw = np.frombuffer(bytes(source), np.uint8)
    for begin, end in zip(cuts[::2], cuts[1::2], strict=True):
        length = rng.choice((0, end - begin, rng.randint(0, end - begin)))
        start = rng.randint(0, SIZE - length)
        local.append(ctypes.addressof(target) + begin)
        peer.append(ctypes.addressof(source) + start)
        lengths.append(length)
        expected[begin : begin + length] = raw[start : start + length]
    return arrays(local, peer, lengths), expected


limits = st.one_of(
    st.integers(PROOF_BYTES + 1, 4 * SIZE),
    st.just(("errno", errno.EINTR)),
    st.just(("errno", errno.EAGAIN)),
)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 1400), st.booleans(), st.lists(limits, max_size=MAX_STALLS - 2))
def test_calls_that_end_early_are_resumed_to_the_last_byte(seed, count, stall, script):
    page = ProofPage()
    rng = random.Random(seed)
    source = ctypes.create_string_buffer(rng.randbytes(SIZE), SIZE)
    target = ctypes.create_string_buffer(b"\xa5" * SIZE, SIZE)
    descriptors, expected = scattered(rng, count, source, target)
    # A call that moves the proof and nothing else may happen once; twice in a row is a fault.
    reader = SimulatedKernel([PROOF_BYTES] * stall + script)
    assert reader.read(page.session, *descriptors).code == 0
    assert np.array_equal(np.frombuffer(bytes(target), np.uint8), expected)


def test_every_batch_fits_the_kernels_bound_and_carries_two_proofs(page):
    source = ctypes.create_string_buffer(os.urandom(SIZE), SIZE)
    target = ctypes.create_string_buffer(SIZE)
    count = 2 * DESCRIPTORS_PER_CALL + 1
    offsets = np.arange(count, dtype=np.uint64) * np.uint64(16)
    reader = SimulatedKernel()
    base = (np.uint64(ctypes.addressof(target)), np.uint64(ctypes.addressof(source)))
    assert reader.read(page.session, offsets + base[0], offsets + base[1], np.full(count, 16, np.uint64)).ok
    assert reader.calls == [(0, IOV_MAX), (0, IOV_MAX), (0, 3)]
    assert reader.copied == 16 * count + 3 * 2 * PROOF_BYTES
    assert target.raw[: 16 * count] == source.raw[: 16 * count]


def test_no_descriptors_still_check_the_proof(page):
    empty = np.empty(0, np.uint64)
    assert SimulatedKernel().read(page.session, empty, empty, empty).ok
    gone = ProofPage()
    session = gone.session
    gone.wipe()
    assert SimulatedKernel().read(session, empty, empty, empty).code == ReadCode.SESSION_LOST


@pytest.mark.parametrize("wipe_after", [1, 512, 2048, 4096 + PROOF_BYTES])
def test_a_source_that_closes_during_the_copy_is_noticed(wipe_after):
    own = ProofPage()
    session = own.session
    source = ctypes.create_string_buffer(os.urandom(4096), 4096)
    target = ctypes.create_string_buffer(4096)
    reader = SimulatedKernel(on_bytes=lambda copied: own.wipe() if copied >= wipe_after else None)
    result = reader.read(session, *arrays([ctypes.addressof(target)], [ctypes.addressof(source)], [4096]))
    assert result.code == ReadCode.SESSION_LOST
    assert "no longer the source" in result.message


def test_a_source_that_closes_between_two_calls_is_noticed():
    own = ProofPage()
    session = own.session
    source = ctypes.create_string_buffer(os.urandom(4096), 4096)
    target = ctypes.create_string_buffer(4096)
    reader = SimulatedKernel([1024], on_bytes=lambda copied: own.wipe() if copied >= 1024 else None)
    result = reader.read(session, *arrays([ctypes.addressof(target)], [ctypes.addressof(source)], [4096]))
    assert result.code == ReadCode.SESSION_LOST


def test_bytes_of_a_foreign_process_are_not_made_good_by_a_later_call():
    # The first call gets part of its bytes from a process without the proof; the rest comes from the right one.
    own = ProofPage()
    session = own.session
    own.wipe()
    source = ctypes.create_string_buffer(os.urandom(4096), 4096)
    target = ctypes.create_string_buffer(4096)
    place = (ctypes.c_char * PROOF_BYTES).from_address(session.proof_addr)

    def prove(copied):
        if copied >= 1024:
            place.raw = session.proof

    reader = SimulatedKernel([1024], on_bytes=prove)
    result = reader.read(session, *arrays([ctypes.addressof(target)], [ctypes.addressof(source)], [4096]))
    assert result.code == ReadCode.SESSION_LOST


def test_an_unmapped_source_names_the_descriptor_and_not_our_address(page):
    source = ctypes.create_string_buffer(os.urandom(SIZE), SIZE)
    target = ctypes.create_string_buffer(SIZE)
    base, there = ctypes.addressof(target), ctypes.addressof(source)
    reader = SimulatedKernel(unmapped=range(there + 8192, there + 12288))
    local, peer, lengths = arrays([base + 4096 * i for i in range(4)], [there + 4096 * i for i in range(4)], [4096] * 4)
    result = reader.read(page.session, local, peer, lengths)
    assert result.code == errno.EFAULT
    assert f"descriptor 2 of 4 (peer address {there + 8192:#x}, 4096 bytes)" in result.message
    assert "not mapped in the source" in result.message
    assert f"{base:x}" not in result.message
    assert target.raw[:8192] == source.raw[:8192]
    assert target.raw[8192:] == bytes(SIZE - 8192)


def test_a_destination_fault_is_told_from_a_source_fault(page):
    source = ctypes.create_string_buffer(4096)
    target = ctypes.create_string_buffer(4096)
    reader = SimulatedKernel([PROOF_BYTES] * 5)
    result = reader.read(page.session, *arrays([ctypes.addressof(target)], [ctypes.addressof(source)], [4096]))
    assert result.code == errno.EFAULT
    assert "the destination of descriptor 0 of 1" in result.message


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN])
def test_endless_interruptions_end(page, code):
    source, target = ctypes.create_string_buffer(64), ctypes.create_string_buffer(64)
    reader = SimulatedKernel([("errno", code)] * 1000)
    result = reader.read(page.session, *arrays([ctypes.addressof(target)], [ctypes.addressof(source)], [64]))
    assert result.code == ReadCode.NO_PROGRESS
    assert len(reader.calls) <= MAX_STALLS + 2


@pytest.mark.parametrize(
    ("code", "result_code", "text"),
    [
        (errno.ESRCH, ReadCode.SESSION_LOST, "is gone"),
        (errno.EPERM, errno.EPERM, "CAP_SYS_PTRACE"),
        (errno.EFAULT, ReadCode.SESSION_LOST, "its proof page is gone"),
        (errno.ENOSYS, errno.ENOSYS, "CONFIG_CROSS_MEMORY_ATTACH"),
        (errno.ENOMEM, errno.ENOMEM, "no memory"),
        (errno.EINVAL, errno.EINVAL, "EINVAL"),
    ],
)
def test_every_errno_has_a_text(page, code, result_code, text):
    source, target = ctypes.create_string_buffer(64), ctypes.create_string_buffer(64)
    reader = SimulatedKernel([("errno", code)])
    result = reader.read(page.session, *arrays([ctypes.addressof(target)], [ctypes.addressof(source)], [64]))
    assert result.code == result_code
    assert text in result.message


@pytest.mark.parametrize(("scope", "text"), [(None, "Yama is not active"), (1, "ptrace_scope is 1"), (3, "is 3")])
def test_a_forbidden_read_tells_about_yama(page, monkeypatch, scope, text):
    monkeypatch.setattr(vmread, "yama_scope", lambda: scope)
    assert text in explain_errno(errno.EPERM, page.session, "x").message


@pytest.mark.parametrize(("content", "scope"), [("0\n", 0), ("2\n", 2), ("", None), ("x", None)])
def test_yama_scope_is_read_from_its_file(tmp_path, monkeypatch, content, scope):
    path = tmp_path / "ptrace_scope"
    path.write_text(content)
    monkeypatch.setattr(vmread, "YAMA_SCOPE_FILE", path)
    assert vmread.yama_scope() == scope
    monkeypatch.setattr(vmread, "YAMA_SCOPE_FILE", tmp_path / "missing")
    assert vmread.yama_scope() is None


def test_absurd_lengths_are_refused_before_the_kernel_sees_them(page):
    reader = SimulatedKernel()
    result = reader.read(page.session, *arrays([4096, 4096], [4096, 4096], [1, 2**63]))
    assert result.code == errno.EINVAL
    assert "descriptor 1 of 2 has 9223372036854775808 bytes" in result.message
    assert reader.calls == []
