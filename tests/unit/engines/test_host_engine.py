"""The host engine inside one process: states, roles, the session table, and that Python runs while it copies."""

import ctypes
import threading
import time

import numpy as np
import pytest

from rd2h.engines import EngineRole, HostOptions, MemoryRegion, ReadCode, create_engine, host
from rd2h.engines.host import HostEngine
from rd2h.errors import EngineError, SessionError, StateError


def descriptors(*rows):
    local, peer, lengths = zip(*rows, strict=True)
    return [np.array(column, dtype=np.uint64) for column in (local, peer, lengths)]


@pytest.fixture
def pair():
    prefill, decode = HostEngine(), HostEngine(HostOptions(max_sessions=2))
    prefill.initialize(EngineRole.PREFILL)
    decode.initialize(EngineRole.DECODE)
    yield prefill, decode
    decode.close()
    prefill.close()


def test_bytes_arrive(pair):
    prefill, decode = pair
    source = np.arange(1000, dtype=np.uint8)
    target = np.full(1000, 0xA5, np.uint8)
    prefill.register_memory([MemoryRegion(source.ctypes.data, source.nbytes)])
    assert prefill.regions == (MemoryRegion(source.ctypes.data, 1000),)
    session = prefill.session()
    decode.open_session(session)
    rows = [(target.ctypes.data + 10, source.ctypes.data + 7, 500), (target.ctypes.data + 600, source.ctypes.data, 3)]
    assert decode.batch_transfer_sync_read(session, *descriptors(*rows)).ok
    expected = np.full(1000, 0xA5, np.uint8)
    expected[10:510] = source[7:507]
    expected[600:603] = source[:3]
    assert np.array_equal(target, expected)
    assert prefill.get_rpc_port() == 0


def test_a_read_opens_the_session_itself(pair):
    prefill, decode = pair
    source, target = np.full(8, 7, np.uint8), np.zeros(8, np.uint8)
    assert decode.batch_transfer_sync_read(
        prefill.session(), *descriptors((target.ctypes.data, source.ctypes.data, 8))
    ).ok
    assert target.tolist() == [7] * 8


def test_roles_are_kept_apart(pair):
    prefill, decode = pair
    with pytest.raises(StateError, match="only a Prefill has a session"):
        decode.session()
    with pytest.raises(StateError, match="only a Decode reads"):
        prefill.open_session(prefill.session())
    with pytest.raises(StateError, match="only a Decode reads"):
        prefill.batch_transfer_sync_read("x", *descriptors((1, 1, 1)))


def test_nothing_works_before_start_or_after_close():
    engine = create_engine("host")
    with pytest.raises(StateError, match="cannot give a session while new"):
        engine.session()
    with pytest.raises(StateError, match="cannot open a session while new"):
        engine.open_session("x")
    assert engine.batch_transfer_sync_read("x", *descriptors((1, 1, 1))).code == ReadCode.ENGINE_CLOSED
    engine.initialize(EngineRole.DECODE)
    with pytest.raises(StateError, match="cannot go from ready to starting"):
        engine.initialize(EngineRole.DECODE)
    engine.close()
    engine.close()
    assert engine.batch_transfer_sync_read("x", *descriptors((1, 1, 1))).code == ReadCode.ENGINE_CLOSED


def test_hostile_sessions_are_results_and_not_exceptions(pair):
    _, decode = pair
    with pytest.raises(SessionError, match="malformed"):
        decode.open_session("host:../../etc/passwd")
    result = decode.batch_transfer_sync_read("host:nonsense", *descriptors((1, 1, 1)))
    assert result.code == ReadCode.SESSION_REFUSED
    assert "malformed" in result.message


def test_closing_the_source_ends_its_session(pair):
    prefill, decode = pair
    session = prefill.session()
    decode.open_session(session)
    prefill.close()
    source, target = np.full(8, 7, np.uint8), np.zeros(8, np.uint8)
    result = decode.batch_transfer_sync_read(session, *descriptors((target.ctypes.data, source.ctypes.data, 8)))
    assert result.code == ReadCode.SESSION_LOST
    with pytest.raises(SessionError, match="no longer the source"):
        decode.open_session(session)


def test_the_session_table_is_bounded_and_forgets_the_least_recently_used(pair):
    _, decode = pair
    sources = [HostEngine() for _ in range(3)]
    for source in sources:
        source.initialize(EngineRole.PREFILL)
    first, second, third = (source.session() for source in sources)
    decode.open_session(first)
    decode.open_session(second)
    data = np.zeros(1, np.uint8)
    row = descriptors((data.ctypes.data, data.ctypes.data, 1))
    assert decode.batch_transfer_sync_read(first, *row).ok
    decode.open_session(third)
    assert list(decode._sessions) == [first, third]
    assert decode.batch_transfer_sync_read(second, *row).ok
    for source in sources:
        source.close()


def test_wrong_arrays_are_a_defect_of_the_caller(pair):
    _, decode = pair
    with pytest.raises(EngineError, match="differ in size"):
        decode.batch_transfer_sync_read("x", np.zeros(1, np.uint64), np.zeros(2, np.uint64), np.zeros(1, np.uint64))


def test_python_runs_while_bytes_move(pair):
    prefill, decode = pair
    source, target = np.ones(32 << 20, np.uint8), np.zeros(32 << 20, np.uint8)
    rows = [(target.ctypes.data, source.ctypes.data, source.nbytes)] * 24
    session = prefill.session()
    decode.open_session(session)
    turns = []
    turning, stop = threading.Event(), threading.Event()

    def turn():
        while not stop.is_set():
            turns.append(time.perf_counter())
            turning.set()

    thread = threading.Thread(target=turn)
    thread.start()
    try:
        assert turning.wait(10)
        started = time.perf_counter()
        assert decode.batch_transfer_sync_read(session, *descriptors(*rows)).ok
        elapsed_s = time.perf_counter() - started
    finally:
        stop.set()
        thread.join(10)
    assert target.all()
    # One kernel call copies 768 MB. If it held the GIL, turns could fall only on its two ends.
    middle = [at for at in turns if 0.25 < (at - started) / elapsed_s < 0.75]
    assert len(middle) > 100


@pytest.mark.parametrize("scope", [None, 0])
def test_without_yama_nothing_is_asked_of_the_kernel(monkeypatch, caplog, scope):
    asked = []
    monkeypatch.setattr(host, "yama_scope", lambda: scope)
    monkeypatch.setattr(host, "_prctl", lambda *args: asked.append(args[0]) or 1)
    host.allow_readers()
    assert asked == [host._PR_GET_DUMPABLE]
    assert not caplog.records


def test_under_yama_any_process_of_the_user_is_named_as_reader(monkeypatch):
    asked = []
    monkeypatch.setattr(host, "yama_scope", lambda: 1)
    monkeypatch.setattr(
        host, "_prctl", lambda *args: asked.append(args) or (1 if args[0] == host._PR_GET_DUMPABLE else 0)
    )
    host.allow_readers()
    assert asked[0][0] == host._PR_SET_PTRACER
    assert ctypes.c_ulong(-1).value == asked[0][1].value
    monkeypatch.setattr(host, "_prctl", lambda *args: -1)
    with pytest.raises(EngineError, match="PR_SET_PTRACER"):
        host.allow_readers()


def test_what_only_an_administrator_can_change_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(host, "yama_scope", lambda: 2)
    monkeypatch.setattr(host, "_prctl", lambda *args: 0)
    host.allow_readers()
    assert "ptrace_scope is 2" in caplog.text
    assert "not dumpable" in caplog.text
