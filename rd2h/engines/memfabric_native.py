"""The boundary to the memfabric_hybrid wheel, and the one native engine of this process.

Facts about the wheel (1.3.0) that shape this file: results are integers, zero is success; details go to its own log on
stdout; `register_memory` before a successful `initialize` returns 0 without effect; `get_rpc_port` is 0 until then;
native connections are made lazily, at the first read of a session.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rd2h.engines.base import EngineRole, MemoryRegion
from rd2h.engines.options import LOG_LEVELS, MemfabricOptions, MemfabricProtocol
from rd2h.errors import ConfigError, EngineError, Rd2hError

logger = logging.getLogger(__name__)

MODULE_NAME: Final = "memfabric_hybrid"
TIMEOUT_VARIABLE: Final = "ASCEND_TRANSFER_TIMEOUT"
STORE_SERVER_ROLE: Final = "Prefill"
"""The side that serves the config store. Equal on both, whatever their own role."""
ROLE_NAMES: Final = {EngineRole.PREFILL: "Prefill", EngineRole.DECODE: "Decode"}
PROTOCOL_MEMBERS: Final = {
    MemfabricProtocol.SDMA: "SDMA",
    MemfabricProtocol.DEVICE_RDMA: "DEVICE_RDMA",
    MemfabricProtocol.DEVICE_URMA: "DEVICE_URMA",
}
"""Names of the wheel's TransDataOpType members."""
DRIVER_FILES: Final = (Path("/etc/ascend_install.info"), Path("/usr/local/Ascend/driver/version.info"))
"""Where the wheel looks for the driver's version."""
NATIVE_ERRORS: Final = (RuntimeError, ValueError, TypeError, IndexError, OverflowError, MemoryError, OSError)
"""What a binding may raise: the translations of C++ exceptions and of unusable arguments."""


@dataclass(frozen=True, slots=True)
class Binding:
    """What the process's native engine is bound to."""

    role: EngineRole
    device_id: int
    hostname: str
    protocol: MemfabricProtocol

    def __str__(self) -> str:
        return f"role {self.role.value}, device {self.device_id}, host {self.hostname}, protocol {self.protocol.value}"


class NativeEngine:
    """The started native engine with the regions registered in it. Thread-safe; counts its users."""

    def __init__(self, binding: Binding, engine: Any, rpc_port: int) -> None:
        self.binding = binding
        self.rpc_port = rpc_port
        self.users = 1
        self._engine = engine
        self._lock = threading.Lock()
        self._regions: list[MemoryRegion] = []

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Register regions that are not wholly inside registered ones. Raises EngineError.

        A region that only partly overlaps a registered one is refused: the wheel has no defined meaning for it.
        """
        with self._lock:
            for region in regions:
                if any(known.contains(region) for known in self._regions):
                    continue
                clash = next((known for known in self._regions if known.overlaps(region)), None)
                if clash is not None:
                    raise EngineError(
                        f"memfabric: region {region.addr:#x}+{region.length} partly overlaps the registered region "
                        f"{clash.addr:#x}+{clash.length}; register whole storages"
                    )
                code = self._engine.register_memory(region.addr, region.length)
                if code:
                    raise EngineError(
                        f"memfabric register_memory failed, ret={code} (address {region.addr:#x}, "
                        f"{region.length} bytes, {self.binding})"
                    )
                self._regions.append(region)

    def read(self, session: str, local: list[int], peer: list[int], lengths: list[int]) -> int:
        """One native batched read; the wheel's result. The wheel releases the GIL while it runs."""
        return int(self._engine.batch_transfer_sync_read(session, local, peer, lengths))

    def destroy(self) -> None:
        """Unregister everything and shut the native engine down. Failures are logged: there is nothing left to undo."""
        with self._lock:
            for region in self._regions:
                code = self._engine.unregister_memory(region.addr)
                if code:
                    logger.warning("memfabric unregister_memory failed, ret=%s (address %#x)", code, region.addr)
            self._regions.clear()
            try:
                self._engine.destroy()
                self._engine.unInitialize()
            except NATIVE_ERRORS as error:
                raise EngineError(f"memfabric shutdown raised {error!r} ({self.binding})") from error


_lock = threading.Lock()
_process_engine: NativeEngine | None = None
_process_binding: Binding | None = None
"""Set while a native engine exists or its start-up is stuck; decides what a further `initialize` may ask for."""


def acquire(binding: Binding, options: MemfabricOptions, bind_thread: Callable[[], None]) -> NativeEngine:
    """The process's native engine, started now or shared. Raises EngineError, also for a different binding."""
    global _process_engine, _process_binding
    with _lock:
        if _process_binding is not None and _process_binding != binding:
            raise EngineError(
                f"memfabric: this process is bound to {_process_binding}, and cannot also be {binding}; "
                "one engine a process"
            )
        if _process_engine is not None:
            _process_engine.users += 1
            return _process_engine
        if _process_binding is not None:
            raise EngineError(f"memfabric: an earlier start-up ({binding}) has not returned; restart the process")
        module = import_wheel()
        _process_binding = binding
        stuck = False
        try:
            engine, stuck = start(module, binding, options, bind_thread)
            if stuck:
                raise EngineError(
                    f"memfabric initialize has not returned within {options.initialize_timeout_s:g} s ({binding}, "
                    f"store {options.effective_store_url}); restart the process after checking driver and config store"
                )
            _process_engine = engine
        finally:
            if _process_engine is None and not stuck:
                _process_binding = None
        if _process_engine is None:
            raise EngineError(f"memfabric: no engine after start-up ({binding})")
        return _process_engine


def release(native: NativeEngine) -> None:
    """Give the native engine back; the last user destroys it and unbinds the process."""
    global _process_engine, _process_binding
    with _lock:
        native.users -= 1
        if native.users:
            return
        _process_engine = None
        _process_binding = None
        native.destroy()


def import_wheel() -> Any:
    """The memfabric_hybrid module. Raises EngineError when it is missing, cannot load, or lacks what we call."""
    try:
        module = importlib.import_module(MODULE_NAME)
    except (ImportError, OSError) as error:
        raise EngineError(
            f"transfer_backend 'memfabric' needs the package {MODULE_NAME}, which cannot be imported: {error}; "
            "install it on both Prefill and Decode (extra 'ascend')"
        ) from error
    for name in ("TransferEngine", "TransDataOpType", "set_log_level", "set_conf_store_tls"):
        if not hasattr(module, name):
            raise EngineError(f"{MODULE_NAME} has no {name}; version 1.2 or later is needed")
    return module


def start(
    module: Any, binding: Binding, options: MemfabricOptions, bind_thread: Callable[[], None]
) -> tuple[NativeEngine | None, bool]:
    """Start a native engine: (engine, False), or (None, True) when the call has not returned in time. Raises
    EngineError.

    The native call runs in a thread of its own, because it may wait for drivers and stores without a bound of its own.
    """
    outcome: list[NativeEngine | Rd2hError] = []

    def run() -> None:
        try:
            bind_thread()
            outcome.append(start_native(module, binding, options))
        except Rd2hError as error:
            outcome.append(error)
        except NATIVE_ERRORS as error:
            outcome.append(EngineError(f"memfabric initialize raised {error!r} ({binding})"))

    thread = threading.Thread(target=run, name="rd2h-memfabric-start", daemon=True)
    thread.start()
    thread.join(options.initialize_timeout_s)
    if not outcome:
        if thread.is_alive():
            return None, True
        raise EngineError(f"memfabric: the start-up thread died without a result ({binding}); see its traceback")
    result = outcome[0]
    if isinstance(result, Rd2hError):
        raise result
    return result, False


def start_native(module: Any, binding: Binding, options: MemfabricOptions) -> NativeEngine:
    """Settings in the order the wheel needs them, then `initialize`. Raises EngineError."""
    export_read_timeout(options.read_timeout_ms, os.environ)
    _check(module.set_log_level(LOG_LEVELS[options.log_level]), "set_log_level", options.log_level)
    apply_tls(module, options)
    member = PROTOCOL_MEMBERS[binding.protocol]
    try:
        op_type = getattr(module.TransDataOpType, member)
    except AttributeError as error:
        raise EngineError(
            f"memfabric_transfer_protocol={binding.protocol.value!r} needs TransDataOpType.{member}, which this "
            f"version of {MODULE_NAME} lacks; it has {', '.join(module.TransDataOpType.__members__)}"
        ) from error
    engine = module.TransferEngine()
    code = engine.initialize(
        options.effective_store_url,
        options.hostname,
        ROLE_NAMES[binding.role],
        options.device_id,
        op_type,
        STORE_SERVER_ROLE,
    )
    if code:
        raise EngineError(
            f"memfabric initialize failed, ret={code} ({binding}, store {options.effective_store_url}); "
            f"{driver_hint()}MemFabric's own log above tells more"
        )
    port = int(engine.get_rpc_port())
    if not 1 <= port <= 65535:
        engine.destroy()
        engine.unInitialize()
        raise EngineError(f"memfabric gave rpc port {port} after initialize ({binding}); expected 1..65535")
    return NativeEngine(binding, engine, port)


def apply_tls(module: Any, options: MemfabricOptions) -> None:
    """Hand the config store's TLS settings to the wheel, or switch TLS off explicitly. Raises EngineError,
    ConfigError.
    """
    tls = options.tls
    if tls is None:
        logger.warning("memfabric: the config store runs without TLS")
        _check(module.set_conf_store_tls(False, ""), "set_conf_store_tls", "off")
        return
    key = _read_secret("memfabric_tls.private_key_path", tls.private_key_path)
    password = ""
    if tls.key_password_path is not None:
        password = _read_secret("memfabric_tls.key_password_path", tls.key_password_path).strip()
    # The password file holds clear text, so the wheel's "decrypt" call-back has nothing to do.
    _check(module.set_conf_store_tls_key(key, password, lambda text: text), "set_conf_store_tls_key", "(secret)")
    _check(module.set_conf_store_tls(True, tls.info), "set_conf_store_tls", tls.info)


def export_read_timeout(read_timeout_ms: int | None, environ: MutableMapping[str, str]) -> int:
    """Set the native read time-out (ms) in the environment of this process, and return it.

    It counts on the side that reads, so Decode needs it as much as Prefill. An explicit option wins over the
    environment, the environment over the value derived from the host's RDMA retry settings. Raises ConfigError.
    """
    if read_timeout_ms is not None:
        value = read_timeout_ms
    elif environ.get(TIMEOUT_VARIABLE, "").strip():
        value = _environment_int(environ, TIMEOUT_VARIABLE, 0, 1, 2**31 - 1)
    else:
        value = derived_read_timeout_ms(environ)
    environ[TIMEOUT_VARIABLE] = str(value)
    return value


def derived_read_timeout_ms(environ: Mapping[str, str]) -> int:
    """What a queue pair may take before it gives up (4.096 us x 2^timeout x retries), plus 3 s of margin; in ms."""
    exponent = _environment_int(environ, "HCCL_RDMA_TIMEOUT", 20, 5, 24)
    retries = _environment_int(environ, "HCCL_RDMA_RETRY_CNT", 7, 1, 7)
    return int(4.096e-3 * 2**exponent * retries) + 3000


def driver_hint() -> str:
    """A sentence for the most common cause of a failed start, or nothing."""
    if any(path.exists() for path in DRIVER_FILES):
        return ""
    return f"no Ascend driver found (neither {DRIVER_FILES[0]} nor {DRIVER_FILES[1]} exists); "


def _environment_int(environ: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    text = environ.get(name, "").strip()
    if not text:
        return default
    if not text.isdecimal() or not low <= int(text) <= high:
        raise ConfigError.bad_value(name, text, f"a whole number, {low}..{high}")
    return int(text)


def _read_secret(key: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}={path!r} cannot be read: {error}", key=key) from error


def _check(code: object, call: str, argument: str) -> None:
    # set_conf_store_tls_key is documented to return None on success.
    if code:
        raise EngineError(f"memfabric {call}({argument}) failed, ret={code}")
