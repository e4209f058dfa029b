"""Sources that die, restart, close, fork, exec, unmap or are not ours to read."""

import ctypes
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from rd2h.engines import EngineRole, ReadCode, create_engine
from rd2h.engines.proof import HostSession, process_identity
from rd2h.errors import SessionError
from rd2h.probing.pattern import pattern_bytes

NOBODY = 65534
CANARY = 0xA5
DEADLINE_S = 60


@pytest.fixture
def engine():
    engine = create_engine("host")
    engine.initialize(EngineRole.DECODE)
    yield engine
    engine.close()


def column(*values):
    return np.array(values, dtype=np.uint64)


def read_all(engine, source, target):
    return engine.batch_transfer_sync_read(
        source.session, column(target.ctypes.data), column(source.addr), column(source.size)
    )


def plant(engine, session):
    """Make the engine believe that it has validated a session: what a process id reused after open looks like."""
    engine._sessions[str(session)] = session
    return str(session)


def test_a_killed_source_is_noticed_and_every_success_before_was_real(engine, start_source):
    source = start_source(8 << 20)
    engine.open_session(source.session)
    expected = pattern_bytes(source.seed, 0, source.size)
    target = np.full(source.size, CANARY, np.uint8)
    repeats = 16  # one batch takes tens of milliseconds, so the kill lands inside one
    batch = (
        column(*[target.ctypes.data] * repeats),
        column(*[source.addr] * repeats),
        column(*[source.size] * repeats),
    )
    results = []
    reading = threading.Event()

    def read_until_failure():
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            target[:] = CANARY
            reading.set()
            result = engine.batch_transfer_sync_read(source.session, *batch)
            results.append((result, np.array_equal(target, expected)))
            if not result.ok:
                return

    thread = threading.Thread(target=read_until_failure)
    thread.start()
    assert reading.wait(DEADLINE_S)
    source.kill()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    last, _ = results[-1]
    assert last.code == ReadCode.SESSION_LOST
    assert str(source.pid) in last.message
    assert all(equal for result, equal in results if result.ok)
    with pytest.raises(SessionError, match="does not exist"):
        engine.open_session(source.session)


def test_a_source_that_closed_its_engine_is_not_read(engine, start_source):
    source = start_source()
    engine.open_session(source.session)
    source.command("close")
    target = np.full(source.size, CANARY, np.uint8)
    result = read_all(engine, source, target)
    assert result.code == ReadCode.SESSION_LOST
    assert "closed its engine" in result.message
    with pytest.raises(SessionError):
        engine.open_session(source.session)


def test_a_restarted_source_cannot_be_read_with_the_old_session(engine, start_source):
    old = start_source()
    old_session = HostSession.parse(old.session)
    engine.open_session(old.session)
    old.kill()
    new = start_source()
    new_session = HostSession.parse(new.session)
    # The old session as if the new process had got its id.
    with pytest.raises(SessionError, match="restarted or its process id reused"):
        engine.open_session(str(replace(old_session, pid=new.pid)))
    # Even with the start time forged, or already validated, the nonce betrays it.
    forged = replace(old_session, pid=new.pid, start_ticks=new_session.start_ticks)
    with pytest.raises(SessionError, match="no longer the source"):
        engine.open_session(str(forged))
    there = replace(forged, proof_addr=new_session.proof_addr)
    with pytest.raises(SessionError, match="no longer the source"):
        engine.open_session(str(there))
    target = np.full(64, CANARY, np.uint8)
    for session in (forged, there):
        result = engine.batch_transfer_sync_read(
            plant(engine, session), column(target.ctypes.data), column(new.addr), column(64)
        )
        assert result.code == ReadCode.SESSION_LOST
        assert str(session) not in engine._sessions
    engine.open_session(new.session)


def test_a_process_that_is_no_source_cannot_be_named_even_with_known_bytes(engine, start_source):
    # Somebody who knows 16 bytes of a process (here its pattern) makes a session of them: the magic is missing.
    source = start_source()
    known = pattern_bytes(source.seed, 4096 + 16, 16).tobytes()
    forged = replace(HostSession.parse(source.session), proof_addr=source.addr + 4096, nonce=known)
    with pytest.raises(SessionError, match="no longer the source"):
        engine.open_session(str(forged))


def test_a_forked_child_is_not_its_parent(engine, start_source):
    source = start_source()
    child = source.command("fork")
    try:
        inherited = replace(HostSession.parse(source.session), pid=child["pid"], start_ticks=child["ticks"])
        with pytest.raises(SessionError, match="no longer the source"):
            engine.open_session(str(inherited))
        engine.open_session(source.session)
    finally:
        os.kill(child["pid"], signal.SIGKILL)


def test_a_process_that_became_another_program_is_not_read(engine, start_source):
    source = start_source()
    engine.open_session(source.session)
    before = process_identity(source.pid).start_ticks
    source.command("exec")
    assert process_identity(source.pid).start_ticks == before  # start time alone would not tell
    result = read_all(engine, source, np.zeros(source.size, np.uint8))
    assert result.code == ReadCode.SESSION_LOST
    with pytest.raises(SessionError):
        engine.open_session(source.session)


def test_unmapped_pages_of_the_source(engine, start_source):
    source = start_source(16 * 4096)
    engine.open_session(source.session)
    assert source.command("unmap", start=8 * 4096, length=4096)["done"]
    target = np.full(3 * 6 * 4096, CANARY, np.uint8)
    base = target.ctypes.data
    # Three descriptors of four pages with canary pages between them; the third runs into the hole after two pages.
    local = column(base, base + 6 * 4096, base + 12 * 4096)
    peer = column(source.addr, source.addr + 2 * 4096, source.addr + 6 * 4096)
    result = engine.batch_transfer_sync_read(source.session, local, peer, column(*[4 * 4096] * 3))
    assert result.code == errno.EFAULT
    assert "descriptor 2 of 3" in result.message
    assert "not mapped in the source" in result.message
    whole = pattern_bytes(source.seed, 0, source.size)
    assert np.array_equal(target[: 4 * 4096], whole[: 4 * 4096])
    assert np.array_equal(target[6 * 4096 : 10 * 4096], whole[2 * 4096 : 6 * 4096])
    for gap in (4, 10, 16):
        assert (target[gap * 4096 : (gap + 2) * 4096] == CANARY).all()
    assert (target[14 * 4096 :] == CANARY).all()
    # The session itself is sound.
    assert engine.batch_transfer_sync_read(source.session, local[:2], peer[:2], column(4096, 4096)).ok


def test_a_protected_destination_of_ours_is_told_apart(engine, start_source):
    source = start_source(4 * 4096)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    raw = np.full(6 * 4096, CANARY, np.uint8)
    base = (raw.ctypes.data + 4095) & ~4095
    assert libc.mprotect(base + 4096, 4096, 1) == 0
    try:
        result = engine.batch_transfer_sync_read(
            source.session, column(base, base + 2 * 4096), column(source.addr, source.addr), column(8192, 100)
        )
    finally:
        assert libc.mprotect(base + 4096, 4096, 3) == 0
    assert result.code == errno.EFAULT
    assert "the destination of descriptor 0 of 2" in result.message
    skip = base - raw.ctypes.data
    assert (raw[skip + 4096 : skip + 2 * 4096 + 100] == CANARY).all()


READER = """
import ctypes, json, os, sys
from rd2h.engines import EngineRole, create_engine
from rd2h.errors import SessionError
settings = json.loads(sys.argv[1])
engine = create_engine("host")
if settings["uid"]:
    os.setgroups([]); os.setgid(settings["uid"]); os.setuid(settings["uid"])
engine.initialize(EngineRole.DECODE)
try:
    engine.open_session(settings["session"])
except SessionError as error:
    print(json.dumps({"error": str(error)}))
else:
    print(json.dumps({"error": None}))
"""


def open_as(uid, session):
    settings = json.dumps({"uid": uid, "session": session})
    done = subprocess.run(
        [sys.executable, "-c", READER, settings], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    return json.loads(done.stdout)["error"]


def ordinary_uid():
    """Who plays the ordinary user: nobody when we are root (root may read everything), else ourselves."""
    return NOBODY if os.geteuid() == 0 else 0


def test_a_source_that_the_kernel_protects_gives_a_clear_text(start_source):
    source = start_source(uid=ordinary_uid(), dumpable=0)
    error = open_as(ordinary_uid(), source.session)
    assert "the kernel forbids reading process" in error
    assert "must be dumpable" in error
    assert "seccomp" in error


def test_an_ordinary_user_reads_its_own_processes(start_source):
    source = start_source(uid=ordinary_uid(), dumpable=1)
    assert open_as(ordinary_uid(), source.session) is None


def test_processes_of_other_users_are_refused_even_for_root(start_source):
    ours = start_source()
    if os.geteuid() == 0:
        theirs = start_source(uid=NOBODY, dumpable=1).session
        assert "only from processes of its own user" in open_as(NOBODY, ours.session)
    else:
        # Not root: process 1 is somebody else's.
        ticks = process_identity(1).start_ticks
        theirs = str(replace(HostSession.parse(ours.session), pid=1, start_ticks=ticks))
    assert "only from processes of its own user" in open_as(0, theirs)


def test_close_waits_for_a_read_that_is_running(start_source):
    source = start_source(8 << 20)
    engine = create_engine("host")
    engine.initialize(EngineRole.DECODE)
    engine.open_session(source.session)
    target = np.zeros(source.size, np.uint8)
    repeats = 32
    results = []
    thread = threading.Thread(
        target=lambda: results.append(
            engine.batch_transfer_sync_read(
                source.session,
                column(*[target.ctypes.data] * repeats),
                column(*[source.addr] * repeats),
                column(*[source.size] * repeats),
            )
        )
    )
    thread.start()
    deadline = time.monotonic() + DEADLINE_S
    while not engine._lifecycle.reads_in_flight and not results and time.monotonic() < deadline:
        time.sleep(0.0005)
    engine.close()
    target[:] = CANARY  # from here on not one byte may arrive
    thread.join(DEADLINE_S)
    assert len(results) == 1
    assert (target == CANARY).all()
