"""The memfabric engine: what it calls, in which order, and what its errors say. The wheel is a stand-in here."""

import importlib.machinery
import sys
import threading
import types

import memfabric_stand_in
import numpy as np
import pytest
from memfabric_stand_in import TransDataOpType

from rd2h.engines import EngineRole, MemfabricOptions, MemfabricProtocol, MemfabricTls, MemoryRegion, ReadCode
from rd2h.engines import memfabric_native as native
from rd2h.engines.memfabric import MemfabricEngine
from rd2h.errors import ConfigError, EngineError, SessionError, StateError

OPTIONS = MemfabricOptions("10.1.2.3", 5)
ONE = np.ones(1, np.uint64)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in (native.TIMEOUT_VARIABLE, "HCCL_RDMA_TIMEOUT", "HCCL_RDMA_RETRY_CNT"):
        monkeypatch.setenv(name, "")
    yield
    assert native._process_binding is None, "a test left the process bound"


@pytest.fixture
def wheel(monkeypatch):
    def install(**results):
        module = memfabric_stand_in.make_module(**results)
        monkeypatch.setitem(sys.modules, "memfabric_hybrid", module)
        return module

    return install


@pytest.fixture
def started():
    """Starts engines and closes them at the end of the test."""
    engines = []

    def start(role=EngineRole.DECODE, options=OPTIONS):
        engine = MemfabricEngine(options)
        engine.initialize(role)
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.close()


def test_the_call_sequence_of_a_whole_life(wheel):
    module = wheel()
    engine = MemfabricEngine(OPTIONS)
    engine.initialize(EngineRole.DECODE)
    assert engine.session() == "10.1.2.3:15001"
    engine.register_memory([MemoryRegion(4096, 100), MemoryRegion(4100, 200), MemoryRegion(8192, 1)])
    engine.open_session("10.9.9.9:15002")
    local, peer, lengths = (np.array(column, np.uint64) for column in ([2**63 + 1, 2], [3, 2**64 - 4], [5, 6]))
    assert engine.batch_transfer_sync_read("10.9.9.9:15002", local, peer, lengths).ok
    engine.close()
    engine.close()
    assert module.calls == [
        ("set_log_level", 2),
        ("set_conf_store_tls", False, ""),
        ("TransferEngine",),
        ("initialize", "tcp://10.1.2.3", "10.1.2.3", "Decode", 5, TransDataOpType.SDMA, "Prefill", ""),
        ("get_rpc_port",),
        ("register_memory", 4096, 204),
        ("register_memory", 8192, 1),
        ("batch_transfer_sync_read", "10.9.9.9:15002", [2**63 + 1, 2], [3, 2**64 - 4], [5, 6], 0),
        ("unregister_memory", 4096),
        ("unregister_memory", 8192),
        ("destroy",),
        ("unInitialize",),
    ]
    arguments = module.calls[7][2]
    assert all(type(value) is int for value in arguments)  # the binding takes Python integers, not NumPy's


@pytest.mark.parametrize(
    ("protocol", "member"),
    [("sdma", "SDMA"), ("device_rdma", "DEVICE_RDMA"), ("device_urma", "DEVICE_URMA")],
)
def test_protocols_reach_the_wheel(wheel, started, protocol, member):
    module = wheel()
    options = MemfabricOptions("h", 0, MemfabricProtocol.parse(protocol), store_url="tcp://s:8500")
    started(EngineRole.PREFILL, options)
    call = next(call for call in module.calls if call[0] == "initialize")
    assert call == ("initialize", "tcp://s:8500", "h", "Prefill", 0, TransDataOpType[member], "Prefill", "")


@pytest.mark.parametrize("value", ["SDMA", "host_rdma", "", None, 1, ["sdma"]])
def test_any_other_protocol_names_key_value_and_what_is_allowed(value):
    expected = r"memfabric_transfer_protocol=.* is not allowed; expected one of 'sdma', 'device_rdma', 'device_urma'"
    with pytest.raises(ConfigError, match=expected) as caught:
        MemfabricProtocol.parse(value)
    assert caught.value.key == "memfabric_transfer_protocol"
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"hostname": "0.0.0.0"}, "hostname"),
        ({"hostname": "::"}, "hostname"),
        ({"hostname": ""}, "hostname"),
        ({"hostname": "a b"}, "hostname"),
        ({"device_id": -1}, "device_id"),
        ({"device_id": True}, "device_id"),
        ({"store_url": "10.0.0.1:8500"}, "store_url"),
        ({"store_url": "tcp://"}, "store_url"),
        ({"log_level": "loud"}, "log_level"),
        ({"initialize_timeout_s": 0}, "initialize_timeout_s"),
        ({"read_timeout_ms": 0}, "read_timeout_ms"),
        ({"max_sessions": 0}, "max_sessions"),
    ],
)
def test_options_are_validated_when_made(fields, key):
    with pytest.raises(ConfigError, match=rf"^{key}=.* is not allowed; expected") as caught:
        MemfabricOptions(**({"hostname": "h", "device_id": 0} | fields))
    assert caught.value.key == key


def test_a_protocol_that_this_wheel_lacks(wheel):
    module = wheel()
    module.TransDataOpType = type("Old", (), {"__members__": {"SDMA": 1}, "SDMA": 1})
    engine = MemfabricEngine(MemfabricOptions("h", 0, MemfabricProtocol.DEVICE_URMA))
    with pytest.raises(EngineError, match=r"'device_urma' needs TransDataOpType.DEVICE_URMA.* it has SDMA"):
        engine.initialize(EngineRole.DECODE)
    engine.close()


def test_ipv6_literals_are_bracketed(wheel, started):
    module = wheel()
    engine = started(options=MemfabricOptions("fd00::1", 0))
    assert engine.session() == "[fd00::1]:15001"
    assert (
        "initialize",
        "tcp://[fd00::1]",
        "fd00::1",
        "Decode",
        0,
        TransDataOpType.SDMA,
        "Prefill",
        "",
    ) in module.calls


def test_failed_start_is_one_error_and_frees_the_process(wheel, monkeypatch, tmp_path):
    wheel(initialize=-1)
    monkeypatch.setattr(native, "DRIVER_FILES", (tmp_path / "a", tmp_path / "b"))
    engine = MemfabricEngine(OPTIONS)
    with pytest.raises(EngineError, match=r"initialize failed, ret=-1 \(role decode, device 5.*no Ascend driver found"):
        engine.initialize(EngineRole.DECODE)
    assert engine.batch_transfer_sync_read("h:1", ONE, ONE, ONE).code == ReadCode.ENGINE_CLOSED
    engine.close()
    (tmp_path / "a").write_text("x")
    with pytest.raises(EngineError) as caught:
        MemfabricEngine(OPTIONS).initialize(EngineRole.DECODE)
    assert "no Ascend driver" not in str(caught.value)


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_an_engine_without_a_port_is_shut_down_again(wheel, port):
    module = wheel(get_rpc_port=port)
    with pytest.raises(EngineError, match=f"gave rpc port {port} after initialize"):
        MemfabricEngine(OPTIONS).initialize(EngineRole.PREFILL)
    assert module.calls[-2:] == [("destroy",), ("unInitialize",)]


def test_a_raising_start_is_an_engine_error(wheel):
    wheel(TransferEngine=RuntimeError("no acl"))
    with pytest.raises(EngineError, match=r"initialize raised RuntimeError\('no acl'\)"):
        MemfabricEngine(OPTIONS).initialize(EngineRole.PREFILL)


def test_a_start_that_hangs_is_given_up_and_never_repeated(wheel):
    release = threading.Event()
    wheel(initialize=lambda *_: release.wait(60) and 0)
    options = MemfabricOptions("h", 0, initialize_timeout_s=0.05)
    try:
        with pytest.raises(EngineError, match=r"has not returned within 0\.05 s .*restart the process"):
            MemfabricEngine(options).initialize(EngineRole.DECODE)
        with pytest.raises(EngineError, match=r"an earlier start-up .* has not returned; restart the process"):
            MemfabricEngine(options).initialize(EngineRole.DECODE)
    finally:
        release.set()
        native._process_binding = None  # what only a restart of the process does otherwise


def test_one_binding_a_process(wheel, started):
    module = wheel()
    first = started(EngineRole.DECODE)
    second = started(EngineRole.DECODE)
    assert first.session() == second.session()
    assert [call[0] for call in module.calls].count("initialize") == 1
    for role, options in (
        (EngineRole.PREFILL, OPTIONS),
        (EngineRole.DECODE, MemfabricOptions("10.1.2.3", 6)),
        (EngineRole.DECODE, MemfabricOptions("10.1.2.4", 5)),
        (EngineRole.DECODE, MemfabricOptions("10.1.2.3", 5, MemfabricProtocol.DEVICE_RDMA)),
    ):
        other = MemfabricEngine(options)
        with pytest.raises(EngineError) as caught:
            other.initialize(role)
        text = str(caught.value)
        assert "bound to role decode, device 5, host 10.1.2.3, protocol sdma" in text
        assert f"role {role.value}, device {options.device_id}, host {options.hostname}" in text
        other.close()
    first.close()
    assert ("destroy",) not in module.calls
    second.close()
    assert module.calls[-1] == ("unInitialize",)


def test_after_the_last_close_the_process_may_be_bound_anew(wheel, started):
    wheel()
    started(EngineRole.DECODE).close()
    assert started(EngineRole.PREFILL, MemfabricOptions("h", 1)).session() == "h:15001"


def test_later_regions_really_are_registered(wheel, started):
    module = wheel()
    engine = started(EngineRole.PREFILL)
    engine.register_memory([MemoryRegion(4096, 4096)])
    engine.register_memory([MemoryRegion(4096, 4096), MemoryRegion(4200, 8), MemoryRegion(65536, 10)])
    engine.register_memory([MemoryRegion(8192, 10)])
    assert [call[1:] for call in module.calls if call[0] == "register_memory"] == [
        (4096, 4096),
        (65536, 10),
        (8192, 10),
    ]
    with pytest.raises(EngineError, match=r"region 0x1ff0\+32 partly overlaps the registered region 0x1000\+4096"):
        engine.register_memory([MemoryRegion(8176, 32)])


def test_a_refused_region_is_named_and_not_counted_as_registered(wheel, started):
    module = wheel(register_memory=-7)
    engine = started(EngineRole.PREFILL)
    for _ in range(2):
        with pytest.raises(
            EngineError, match=r"register_memory failed, ret=-7 \(address 0x1000, 16 bytes, role prefill"
        ):
            engine.register_memory([MemoryRegion(4096, 16)])
    assert [call[0] for call in module.calls].count("register_memory") == 2


def test_registration_needs_a_started_engine(wheel):
    module = wheel()
    # The wheel itself would return 0 here without registering anything.
    with pytest.raises(StateError, match="cannot register memory while new"):
        MemfabricEngine(OPTIONS).register_memory([MemoryRegion(4096, 16)])
    assert module.calls == []


@pytest.mark.parametrize(
    ("outcome", "code", "text"),
    [
        (-1, -1, "memfabric batch read failed, ret=-1 (1 descriptors)"),
        (107, 107, "ret=107"),
        (RuntimeError("link down"), ReadCode.NATIVE_EXCEPTION, "raised RuntimeError('link down')"),
        (TypeError("incompatible"), ReadCode.NATIVE_EXCEPTION, "raised TypeError"),
    ],
)
def test_a_failed_read_is_a_result(wheel, started, outcome, code, text):
    wheel(batch_transfer_sync_read=outcome)
    result = started().batch_transfer_sync_read("h:1", ONE, ONE, ONE)
    assert result.code == code
    assert text in result.message


@pytest.mark.parametrize(
    "session",
    ["", "h", "h:", "h:0", "h:65536", "h:1 ", "h:01", ":1", "a b:1", "[::]:1", "0.0.0.0:1", "[zz]:1", "[fd00::1:1",
     "fd00::1:1", "h:1\0", "-h:1", "h:٣", "x" * 300 + ":1", "tcp://h:1", "[1::2::3]:1"],
)  # fmt: skip
def test_hostile_sessions_never_reach_the_wheel(wheel, started, session):
    module = wheel()
    engine = started()
    with pytest.raises(SessionError, match="memfabric session"):
        engine.open_session(session)
    assert engine.batch_transfer_sync_read(session, ONE, ONE, ONE).code == ReadCode.SESSION_REFUSED
    assert "batch_transfer_sync_read" not in [call[0] for call in module.calls]


@pytest.mark.parametrize("session", ["h:1", "node-1.example:65535", "10.0.0.1:20000", "[fd00::1]:20000"])
def test_good_sessions_are_accepted_and_the_table_is_bounded(wheel, started, session):
    wheel()
    engine = started(options=MemfabricOptions("10.1.2.3", 5, max_sessions=2))
    for number in range(1, 5):
        engine.open_session(f"h:{number}")
    engine.open_session(session)
    assert list(engine._sessions) == ["h:4", session]
    engine.open_session("h:4")
    assert list(engine._sessions) == [session, "h:4"]


def test_an_empty_batch_and_a_prefill_do_not_read(wheel, started):
    module = wheel()
    empty = np.empty(0, np.uint64)
    engine = started()
    assert engine.batch_transfer_sync_read("h:1", empty, empty, empty).ok
    engine.close()
    with pytest.raises(StateError, match="only a Decode reads"):
        started(EngineRole.PREFILL).batch_transfer_sync_read("h:1", ONE, ONE, ONE)
    assert "batch_transfer_sync_read" not in [call[0] for call in module.calls]


def test_close_waits_for_a_running_read(wheel):
    inside, go_on = threading.Event(), threading.Event()
    module = wheel(batch_transfer_sync_read=lambda *_: inside.set() or int(not go_on.wait(60)))
    engine = MemfabricEngine(MemfabricOptions("h", 0, close_timeout_s=0.05))
    engine.initialize(EngineRole.DECODE)
    results = []
    thread = threading.Thread(target=lambda: results.append(engine.batch_transfer_sync_read("h:1", ONE, ONE, ONE)))
    thread.start()
    assert inside.wait(10)
    with pytest.raises(EngineError, match="1 reads still running"):
        engine.close()
    assert ("destroy",) not in module.calls
    go_on.set()
    thread.join(10)
    engine.close()
    assert results[0].ok
    assert module.calls[-2:] == [("destroy",), ("unInitialize",)]


def test_every_reading_thread_selects_the_device_once(wheel, monkeypatch):
    wheel()
    chosen = []
    torch_npu = types.ModuleType("torch_npu")
    torch_npu.__spec__ = importlib.machinery.ModuleSpec("torch_npu", None)
    torch_npu.npu = types.SimpleNamespace(set_device=lambda number: chosen.append((threading.get_ident(), number)))
    monkeypatch.setitem(sys.modules, "torch_npu", torch_npu)
    engine = MemfabricEngine(OPTIONS)
    engine.initialize(EngineRole.DECODE)
    starting = len(chosen)
    assert starting == 1  # the thread of the native start

    def read_twice():
        for _ in range(2):
            assert engine.batch_transfer_sync_read("h:1", ONE, ONE, ONE).ok

    threads = [threading.Thread(target=read_twice) for _ in range(3)]
    for thread in threads:
        thread.start()
        thread.join(10)
    assert [number for _, number in chosen] == [5] * 4

    torch_npu.npu.set_device = None
    engine._set_device = lambda number: (_ for _ in ()).throw(RuntimeError("device lost"))
    results = []
    thread = threading.Thread(target=lambda: results.append(engine.batch_transfer_sync_read("h:1", ONE, ONE, ONE)))
    thread.start()
    thread.join(10)
    assert results[0].code == ReadCode.NATIVE_EXCEPTION
    assert "cannot select NPU 5 in this thread: device lost" in results[0].message
    engine.close()


def test_a_broken_torch_npu_is_a_clear_start_error(wheel, monkeypatch, tmp_path):
    wheel()
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libascendcl.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EngineError, match=r"torch_npu is installed but cannot be imported: libascendcl\.so"):
        MemfabricEngine(OPTIONS).initialize(EngineRole.DECODE)


def test_a_missing_wheel_is_a_clear_start_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "memfabric_hybrid", None)
    with pytest.raises(EngineError, match="needs the package memfabric_hybrid, which cannot be imported"):
        MemfabricEngine(OPTIONS).initialize(EngineRole.DECODE)


def test_a_wheel_that_is_too_old_is_a_clear_start_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "memfabric_hybrid", types.ModuleType("memfabric_hybrid"))
    with pytest.raises(EngineError, match=r"has no TransferEngine; version 1\.2"):
        MemfabricEngine(OPTIONS).initialize(EngineRole.DECODE)


def test_tls_settings_reach_the_wheel(wheel, started, tmp_path):
    module = wheel()
    (tmp_path / "key.pem").write_text("KEY\n")
    (tmp_path / "password").write_text("secret\n")
    tls = MemfabricTls("tlsCaPath: /ca;", str(tmp_path / "key.pem"), str(tmp_path / "password"))
    started(options=MemfabricOptions("h", 0, tls=tls))
    assert module.calls[1:3] == [
        ("set_conf_store_tls_key", "KEY\n", "secret", "x"),
        ("set_conf_store_tls", True, "tlsCaPath: /ca;"),
    ]


def test_tls_troubles_are_named_and_secrets_are_not(wheel, tmp_path):
    tls = MemfabricTls("tlsCaPath: /ca;", str(tmp_path / "missing.pem"))
    with pytest.raises(ConfigError, match=r"memfabric_tls\.private_key_path=.*missing\.pem.* cannot be read"):
        wheel() and MemfabricEngine(MemfabricOptions("h", 0, tls=tls)).initialize(EngineRole.DECODE)
    (tmp_path / "missing.pem").write_text("KEY")
    wheel(set_conf_store_tls_key=-1)
    with pytest.raises(EngineError, match=r"set_conf_store_tls_key\(\(secret\)\) failed, ret=-1"):
        MemfabricEngine(MemfabricOptions("h", 0, tls=tls)).initialize(EngineRole.DECODE)
    for fields in ({"info": " ", "private_key_path": "x"}, {"info": "x", "private_key_path": ""}):
        with pytest.raises(ConfigError, match="memfabric_tls"):
            MemfabricTls(**fields)


def test_the_read_timeout_is_set_on_the_side_that_reads(wheel, started, monkeypatch):
    wheel()
    started(EngineRole.DECODE)
    assert native.os.environ[native.TIMEOUT_VARIABLE] == "33064"


@pytest.mark.parametrize(
    ("option", "environ", "expected"),
    [
        (None, {}, 33064),
        (None, {"HCCL_RDMA_TIMEOUT": "18", "HCCL_RDMA_RETRY_CNT": "3"}, 6221),
        (None, {native.TIMEOUT_VARIABLE: "5000"}, 5000),
        (250, {native.TIMEOUT_VARIABLE: "5000"}, 250),
    ],
)
def test_where_the_read_timeout_comes_from(option, environ, expected):
    assert native.export_read_timeout(option, environ) == expected
    assert environ[native.TIMEOUT_VARIABLE] == str(expected)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HCCL_RDMA_TIMEOUT", "25"),
        ("HCCL_RDMA_RETRY_CNT", "0"),
        (native.TIMEOUT_VARIABLE, "soon"),
        ("HCCL_RDMA_TIMEOUT", "-5"),
    ],
)
def test_a_nonsensical_environment_is_a_clear_start_error(name, value):
    with pytest.raises(ConfigError, match=rf"{name}='{value}' is not allowed; expected a whole number"):
        native.export_read_timeout(None, {name: value})
