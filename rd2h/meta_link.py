"""The scheduler halves' control plane over the meta service: see ``rd2h.control`` for the contract.

Health follows the data path: before every keep-alive Decode's own connector ports are probed with a heartbeat that only
a live receiving thread with live readers answers.
"""

import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import zmq
from rd2h_client import BackgroundMetaClient, ClientOptions, EngineStatus, QueueFullError, TlsOptions
from rd2h_client.addresses import join_host_port
from rd2h_client.v1 import engine_registry_pb2 as registry
from rd2h_client.v1 import rendezvous_pb2 as rendezvous

from rd2h import errors
from rd2h.config import ConnectorConfig
from rd2h.control import Advert, DecodeAddress, Identity, Notice, Registered
from rd2h.layout import Contract
from rd2h.load import LoadMeter
from rd2h.topology import rank_port
from rd2h.wire import WIRE_VERSION, Pong, decode_from_prefill, encode_ping

logger = logging.getLogger(__name__)

VANISHED_GRACE_S = 30.0
"""An engine that vanishes from the registry without a successor stays trusted so long: the service may restart."""

_OUTCOMES = {
    "done": rendezvous.OUTCOME_DONE,
    "aborted": rendezvous.OUTCOME_ABORTED,
    "failed": rendezvous.OUTCOME_FAILED,
}


class MetaLink:
    """See the module. Starts its client at once; every method returns at once."""

    def __init__(
        self, config: ConnectorConfig, identity: Identity, contract: Contract, producer: bool, load: LoadMeter
    ) -> None:
        self._identity, self._fingerprint, self._load = identity, contract.fingerprint(), load
        self._unhealthy = ""
        self._probe = None if producer else DataPathProbe(config.bind_host or identity.host, identity)
        self._trust = RegistryTrust(VANISHED_GRACE_S)
        tls = None
        if config.meta_ca or config.meta_cert:
            tls = TlsOptions(config.meta_ca, config.meta_cert, config.meta_key)
        self._client = BackgroundMetaClient(
            config.meta_service or "",
            ClientOptions(tls=tls, token=config.meta_token),
            _engine(config, identity, contract, producer),
            self._status,
        )
        self._client.start()

    def advertise(self, advert: Advert) -> None:
        """Announce a child. Raises QueueFullError."""
        identity = self._identity
        child = rendezvous.Child(
            request_id=advert.request_id,
            token=advert.token,
            engine_id=identity.engine_id,
            generation=identity.generation,
            host=identity.host,
            base_port=identity.base_port,
            tp_size=identity.tp_size,
            cached_tokens=advert.cached_tokens,
            wire_version=WIRE_VERSION,
            layout_fingerprint=self._fingerprint,
            prompt_index=advert.prompt_index,
            choice_index=advert.choice_index,
            prompt_tokens=advert.prompt_tokens,
        )
        try:
            self._client.advertise(advert.rendezvous_id, child)
        except QueueFullError as error:
            raise errors.QueueFullError(str(error)) from error

    def withdraw(self, advert: Advert, outcome: str, reason: str) -> None:
        """Take a child back."""
        try:
            self._client.withdraw(
                advert.rendezvous_id,
                advert.request_id,
                _OUTCOMES[outcome],
                reason,
                advert.prompt_index,
                advert.choice_index,
            )
        except QueueFullError as error:
            logger.warning("rd2h: the end of %s is left to its time limit: %s", advert.request_id, error)

    def report_failure(self, rendezvous_id: str, request_ids: Sequence[str], reason: str) -> None:
        """Prefill will not deliver these children."""
        try:
            self._client.report_failure(rendezvous_id, reason, request_ids)
        except QueueFullError as error:
            logger.warning("rd2h: the failure of %s is left to its time limit: %s", rendezvous_id, error)

    def drain_notices(self) -> list[Notice]:
        """Notices since the last call."""
        return [
            Notice(n.rendezvous_id, n.request_id, n.reason or "ended elsewhere") for n in self._client.drain_events()
        ]

    def registered(self) -> Registered:
        """Registered engines, with a grace for those that vanish without a successor."""
        return self._trust.update(self._client.engines(), time.monotonic())

    def note_unhealthy(self, reason: str) -> None:
        """For the next keep-alive."""
        self._unhealthy = reason

    def stop(self) -> None:
        """Deregister and end the client's thread."""
        self._client.stop(2.0)

    def _status(self) -> EngineStatus:
        reason = self._unhealthy or (self._probe.check() if self._probe is not None else "")
        load = self._load.read()
        return EngineStatus(
            state=registry.ENGINE_STATE_SERVING,
            load=registry.Load(
                running_requests=load.running,
                pulling_requests=load.pulling,
                free_kv_tokens=load.free_kv_tokens,
                total_kv_tokens=load.total_kv_tokens,
            ),
            health=registry.DataPathHealth(ok=not reason, reason=reason),
        )


class RegistryTrust:
    """Which engines count as registered, over changing snapshots of the registry."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._snapshot: Mapping[str, registry.Engine] = {}
        self._vanished: dict[str, tuple[registry.Engine, float]] = {}
        self._registered = Registered()

    def update(self, snapshot: Mapping[str, registry.Engine], now_s: float) -> Registered:
        """Engines trusted now; ``snapshot`` is replaced, never changed, so identity tells whether it is news."""
        if snapshot is self._snapshot and not self._vanished:
            return self._registered
        for engine_id, engine in self._snapshot.items():
            if engine_id not in snapshot:
                self._vanished.setdefault(engine_id, (engine, now_s + self._grace_s))
        self._snapshot = snapshot
        self._vanished = {
            engine_id: (engine, until)
            for engine_id, (engine, until) in self._vanished.items()
            if engine_id not in snapshot and now_s < until
        }
        engines = [*snapshot.values(), *(engine for engine, _ in self._vanished.values())]
        current = Registered(
            frozenset(e.generation for e in engines if e.role == registry.ENGINE_ROLE_PREFILL),
            frozenset(
                DecodeAddress(e.generation, e.host, e.base_port)
                for e in engines
                if e.role == registry.ENGINE_ROLE_DECODE
            ),
        )
        if current != self._registered:
            self._registered = current
        return self._registered


class DataPathProbe:
    """Heartbeats to Decode's own connector ports, from the client's thread; never waits."""

    def __init__(self, host: str, identity: Identity) -> None:
        self._host, self._identity = host, identity
        self._sockets: dict[int, zmq.Socket[Any]] = {}
        self._numbers = itertools.count(1)
        self._sent: dict[int, int] = {}

    def check(self) -> str:
        """Why the data path is not healthy, by the answers to the previous call's heartbeats; "" when it is."""
        silent = []
        for d_rank in range(self._identity.tp_size):
            socket = self._sockets.get(d_rank)
            if socket is None:
                socket = self._sockets[d_rank] = self._connect(d_rank)
            if d_rank in self._sent and self._sent[d_rank] not in self._answers(socket):
                silent.append(d_rank)
            number = next(self._numbers)
            try:
                socket.send(encode_ping(self._identity.generation, number), zmq.NOBLOCK)
                self._sent[d_rank] = number
            except zmq.Again:
                silent.append(d_rank)
        return f"the reader of Decode rank {silent[0]} does not answer" if silent else ""

    def _connect(self, d_rank: int) -> "zmq.Socket[Any]":
        socket: zmq.Socket[Any] = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 16)
        socket.setsockopt(zmq.RCVHWM, 16)
        socket.setsockopt(zmq.IPV6, 1 if ":" in self._host else 0)
        socket.connect(f"tcp://{join_host_port(self._host, rank_port(self._identity.base_port, d_rank))}")
        return socket

    def _answers(self, socket: "zmq.Socket[Any]") -> set[int]:
        numbers: set[int] = set()
        while True:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return numbers
            try:
                message = decode_from_prefill(frames[-1])
            except errors.WireError:
                continue  # whoever owns the port is not our reader; without an answer it counts as silent
            if isinstance(message, Pong) and message.generation == self._identity.generation:
                numbers.add(message.clock_ns)


def _engine(config: ConnectorConfig, identity: Identity, contract: Contract, producer: bool) -> registry.Engine:
    layout = registry.Layout(
        wire_version=contract.wire_version,
        transfer_backend=contract.transfer_backend,
        transfer_protocol=contract.transfer_protocol,
        model=contract.model,
        kv_dtype=contract.kv_dtype,
        block_size_tokens=contract.block_size_tokens,
        layers=[
            registry.LayerLayout(name=name, main_block_bytes=main, indexer_block_bytes=indexer, scale_block_bytes=scale)
            for name, main, indexer, scale in contract.layers
        ],
        fingerprint=contract.fingerprint(),
    )
    return registry.Engine(
        engine_id=identity.engine_id,
        generation=identity.generation,
        role=registry.ENGINE_ROLE_PREFILL if producer else registry.ENGINE_ROLE_DECODE,
        host=identity.host,
        base_port=identity.base_port,
        tp_size=identity.tp_size,
        dp_size=identity.dp_size,
        dp_rank=identity.dp_rank,
        http_address=config.http_address or "",
        state=registry.ENGINE_STATE_SERVING,
        layout=layout,
    )
