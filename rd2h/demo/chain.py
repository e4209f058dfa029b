"""The whole chain on one machine: meta service, Prefill, Decode, proxy, and what the demo compares them with."""

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rd2h.demo.engine_spec import EngineSpec
from rd2h.demo.launcher import Launcher
from rd2h.demo.lifetime import LaunchError
from rd2h.demo.ports import LOOPBACK, free_port
from rd2h.demo.process import ManagedProcess
from rd2h.demo.timeline import TimelineFile
from rd2h.timeline import ENVIRONMENT

COMPONENT_TIMEOUT_S = 60.0
_POLL_S = 0.05


@dataclass
class Chain:
    """Starts and names the parts; the launcher owns their processes."""

    launcher: Launcher
    model_dir: Path
    chunk_tokens: int = 256
    # Added to every engine's kv_connector_extra_config.
    kv_extra: Mapping[str, object] = field(default_factory=dict)
    # Added to every engine's command line and environment.
    engine_args: tuple[str, ...] = ()
    engine_env: Mapping[str, str] = field(default_factory=dict)

    def start_meta(self, port: int | None = None) -> "MetaProcess":
        """Starts the meta service and waits until it accepts connections."""
        port = port or free_port()
        address = f"{LOOPBACK}:{port}"
        process = self.launcher.start_component("meta", ["meta", "serve", "--listen", address])
        wait_listening(process, port)
        return MetaProcess(process, address)

    def start_single(self, name: str = "single") -> ManagedProcess:
        """An ordinary engine with the same weights, without a connector."""
        return self.launcher.start_engine(self._spec(name))

    def start_prefill(
        self, meta: "MetaProcess", name: str = "prefill", port: int | None = None, tp_size: int = 1
    ) -> "ConnectedEngine":
        """A Prefill engine."""
        return self._start(EngineSpec(name, self.model_dir, "kv_producer", tp_size=tp_size), meta, {}, port)

    def start_decode(
        self,
        meta: "MetaProcess",
        name: str = "decode",
        port: int | None = None,
        kv_port: int | None = None,
        extra: Mapping[str, object] | None = None,
        changes: Mapping[str, Any] | None = None,
    ) -> "ConnectedEngine":
        """A Decode engine; `extra` adds to its kv_connector_extra_config, `changes` to the fields of its spec."""
        tp_size = (changes or {}).get("tp_size", 1)
        spec = EngineSpec(name, self.model_dir, "kv_consumer", kv_port=kv_port or free_port(tp_size))
        return self._start(replace(spec, **(changes or {})), meta, extra or {}, port)

    def start_proxy(
        self, meta: "MetaProcess", prefill: ManagedProcess, decode: ManagedProcess, name: str = "proxy"
    ) -> ManagedProcess:
        """A proxy in front of one Prefill and one Decode engine; ready when this returns."""
        port = free_port()
        arguments = ["proxy", "--host", LOOPBACK, "--port", str(port), "--meta-service", f"grpc://{meta.address}"]
        for flag, engine in (("prefiller", prefill), ("decoder", decode)):
            arguments += [f"--{flag}-hosts", LOOPBACK, f"--{flag}-ports", engine.url.rpartition(":")[2]]
        proxy = self.launcher.start_component(name, arguments, url=f"http://{LOOPBACK}:{port}")
        proxy.wait_ready(COMPONENT_TIMEOUT_S, self.launcher.progress, path="/healthcheck")
        return proxy

    def _spec(self, name: str) -> EngineSpec:
        return self._everywhere(EngineSpec(name, self.model_dir))

    def _everywhere(self, spec: EngineSpec) -> EngineSpec:
        """The spec with what all engines of the chain have in common."""
        return replace(
            spec,
            max_batched_tokens=self.chunk_tokens,
            extra_args=(*self.engine_args, *spec.extra_args),
            env={**self.engine_env, **spec.env},
        )

    def _start(
        self, spec: EngineSpec, meta: "MetaProcess", extra: Mapping[str, object], port: int | None
    ) -> "ConnectedEngine":
        port = port or free_port()
        timeline = TimelineFile(self.launcher.log_dir / f"{spec.name}.timeline.jsonl")
        common = self._everywhere(spec)
        full = replace(
            common,
            kv_extra={
                "transfer_backend": "host",
                "meta_service": f"grpc://{meta.address}",
                "advertise_host": LOOPBACK,
                "http_address": f"{LOOPBACK}:{port}",
                **self.kv_extra,
                **extra,
            },
            env={**common.env, ENVIRONMENT: str(timeline.path)},
        )
        return ConnectedEngine(self.launcher.start_engine(full, port), timeline, full.kv_port)


@dataclass(frozen=True)
class MetaProcess:
    """A running meta service."""

    process: ManagedProcess
    # host:port of its gRPC server.
    address: str

    @property
    def port(self) -> int:
        """Its gRPC port."""
        return int(self.address.rpartition(":")[2])


@dataclass(frozen=True)
class ConnectedEngine:
    """An engine with a connector, and the events it writes."""

    process: ManagedProcess
    timeline: TimelineFile
    kv_port: int | None

    @property
    def url(self) -> str:
        """Base URL of its OpenAI server."""
        return self.process.url


def wait_listening(process: ManagedProcess, port: int, timeout_s: float = COMPONENT_TIMEOUT_S) -> None:
    """Waits until the process accepts TCP connections on the port.

    Raises LaunchError, with the end of its log, when it ends first or the time is over.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        code = process.poll()
        if code is not None:
            raise LaunchError(f"{process.name} ended with code {code}; its log ends:\n{process.log_tail()}")
        try:
            with socket.create_connection((LOOPBACK, port), timeout=1.0):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise LaunchError(f"{process.name} does not listen on {port}: {error}") from None
        time.sleep(_POLL_S)
