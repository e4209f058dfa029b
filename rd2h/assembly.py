"""Puts the parts of an engine together: configuration and registered caches in, running halves out."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rd2h import startup, vllm_compat
from rd2h.caches import cache_device, cache_layout, device_index, kv_dtype, layer_slots, storage_regions
from rd2h.config import ConnectorConfig
from rd2h.control import ControlPlane, Identity
from rd2h.decode.destination import Destination
from rd2h.decode.options import PullerOptions
from rd2h.decode.puller import Puller
from rd2h.decode.scheduler import DecodeScheduler
from rd2h.decode.worker import DecodeWorker
from rd2h.engines import (
    EngineOptions,
    EngineRole,
    MemfabricOptions,
    MemfabricProtocol,
    MemoryRegion,
    TransferEngine,
    create_engine,
)
from rd2h.engines.suppressed import SuppressedReads
from rd2h.errors import ConfigError
from rd2h.groups import CacheGroups, infer_groups
from rd2h.layout import CacheLayout, Contract, contract_layers, encode_layer_map
from rd2h.load import LoadMeter
from rd2h.offload.destination import find_manager, offload_destination, offload_layout
from rd2h.prefill.admission import AdmissionRules
from rd2h.prefill.device import event_recorder
from rd2h.prefill.publisher import Publisher, PublisherOptions, SourceMemory
from rd2h.prefill.scheduler import PrefillScheduler
from rd2h.prefill.worker import PrefillWorker
from rd2h.stats import TransferStats
from rd2h.steps import ChildFailure
from rd2h.timeline import Timeline
from rd2h.wire import WIRE_VERSION, PeerInfo


@dataclass(frozen=True, slots=True)
class Handshake:
    """What a worker knows after registration."""

    generation: int
    contract: Contract


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Everything about an engine that is known before its caches are."""

    config: ConnectorConfig
    producer: bool
    engine_id: str
    base_port: int
    host: str
    model: str
    sizes: vllm_compat.ParallelSizes
    groups: CacheGroups
    num_blocks: int
    base_layers: int
    offload: bool = False
    """Decode keeps main KV in a host pool that its TP ranks share."""

    @classmethod
    def of(cls, vllm_config: Any, kv_cache_config: Any) -> EngineFacts:
        """Facts from vLLM's configuration; raises ConfigError in one line for anything that cannot work."""
        transfer = vllm_config.kv_transfer_config
        config = ConnectorConfig.parse(transfer.kv_connector_extra_config or {})
        producer = startup.is_producer(transfer.kv_role)
        sizes = vllm_compat.parallel_sizes(vllm_config)
        if sizes.pp_size != 1 or sizes.cp_size != 1:
            raise ConfigError(
                f"pipeline parallel size {sizes.pp_size} and context parallel size {sizes.cp_size} are not supported; "
                "both must be 1",
                key="parallel_config",
            )
        startup.check_microbatches(vllm_config.parallel_config, producer)
        startup.check_pairing(config, producer, sizes.tp_size)
        startup.check_processors(config, sizes.tp_size)
        text_config = vllm_config.model_config.hf_text_config
        offload = startup.offload_enabled(vllm_config.additional_config)
        sparse_on_npu = config.transfer_backend == "memfabric" and hasattr(text_config, "index_topk")
        startup.check_offload_side(offload, producer, sparse_on_npu=sparse_on_npu)
        policy = getattr(transfer, "kv_load_failure_policy", "fail")
        startup.check_load_failures(policy, producer=producer, siblings=False, offload=offload)
        groups = kv_cache_config.kv_cache_groups
        return cls(
            config,
            producer,
            transfer.engine_id,
            0 if producer else startup.decode_base_port(transfer.kv_port, sizes.dp_rank, sizes.dp_size, sizes.tp_size),
            startup.reachable_host(config, config.advertise_host or vllm_compat.own_host()),
            vllm_compat.served_model(vllm_config),
            sizes,
            infer_groups([g.layer_names for g in groups], [g.kv_cache_spec.block_size for g in groups]),
            kv_cache_config.num_blocks,
            text_config.num_hidden_layers,
            offload,
        )

    def contract(self, layout: CacheLayout, dtype: str) -> Contract:
        """What this engine's peers must agree on."""
        memfabric = self.config.transfer_backend == "memfabric"
        return Contract(
            WIRE_VERSION,
            self.config.transfer_backend,
            self.config.memfabric_transfer_protocol if memfabric else "",
            self.model,
            dtype,
            self.groups.block_size_tokens,
            contract_layers(layout),
        )

    def identity(self, generation: int) -> Identity:
        """Who this engine is towards its peers."""
        sizes = self.sizes
        return Identity(
            self.engine_id, generation, self.host, self.base_port, sizes.tp_size, sizes.dp_size, sizes.dp_rank
        )


# --- scheduler halves -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class PrefillSchedulerSide:
    """Prefill's scheduler half and its control plane."""

    half: PrefillScheduler
    control: ControlPlane | None
    contacting: bool = False
    """A worker still tries to reach a Decode: the engine goes on stepping, so that a failure is heard of."""

    def note_workers(self, failures: Sequence[ChildFailure], unhealthy: str, contacting: bool) -> None:
        """What the workers reported in a step."""
        self.contacting = contacting
        self.half.worker_failures(failures)
        if unhealthy and self.control is not None:
            self.control.note_unhealthy(unhealthy)

    def close(self) -> None:
        """Deregister."""
        if self.control is not None:
            self.control.stop()


@dataclass(slots=True)
class DecodeSchedulerSide:
    """Decode's scheduler half and its control plane."""

    half: DecodeScheduler
    control: ControlPlane | None

    def note_workers(self, reasons: Mapping[str, str], unhealthy: str) -> None:
        """What the workers reported in a step."""
        self.half.note_reasons(reasons)
        if unhealthy and self.control is not None:
            self.control.note_unhealthy(unhealthy)

    def take_stats(self) -> dict[str, float]:
        """Counters since the last call."""
        return self.half.stats.take()

    def close(self) -> None:
        """Deregister."""
        if self.control is not None:
            self.control.stop()


def prefill_scheduler(
    facts: EngineFacts, handshakes: Mapping[int, Handshake], load: LoadMeter, beside_loaders: bool
) -> PrefillSchedulerSide:
    """Prefill's scheduler half, registered with the meta service if one is configured."""
    handshake = _agreed(facts, handshakes)
    control = _control(facts, handshake, load)
    rules = AdmissionRules(
        facts.sizes.tp_size,
        handshake.contract.fingerprint(),
        facts.config.require_registered_decode,
        facts.config.legacy_decode_hosts,
    )
    half = PrefillScheduler(
        facts.groups,
        handshake.contract,
        rules,
        control,
        Timeline.from_environment("P"),
        facts.config.registration_wait_s,
        beside_loaders=beside_loaders,
    )
    return PrefillSchedulerSide(half, control)


def decode_scheduler(facts: EngineFacts, handshakes: Mapping[int, Handshake], load: LoadMeter) -> DecodeSchedulerSide:
    """Decode's scheduler half, registered with the meta service if one is configured."""
    handshake = _agreed(facts, handshakes)
    control = _control(facts, handshake, load)
    half = DecodeScheduler(facts.groups, handshake.contract, control, Timeline.from_environment("D"))
    load.pulling = lambda: half.pulling
    return DecodeSchedulerSide(half, control)


def _agreed(facts: EngineFacts, handshakes: Mapping[int, Handshake]) -> Handshake:
    distinct = set(handshakes.values())
    if len(handshakes) != facts.sizes.tp_size or len(distinct) != 1:
        raise ConfigError(f"{len(handshakes)} of {facts.sizes.tp_size} workers registered, in {len(distinct)} layouts")
    return distinct.pop()


def _control(facts: EngineFacts, handshake: Handshake, load: LoadMeter) -> ControlPlane | None:
    if facts.config.meta_service is None:
        return None
    from rd2h.meta_link import MetaLink

    return MetaLink(facts.config, facts.identity(handshake.generation), handshake.contract, facts.producer, load)


# --- worker halves ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class PrefillWorkerSide:
    """Prefill's worker half with its engine and publisher."""

    worker: PrefillWorker
    publisher: Publisher
    engine: TransferEngine
    stats: TransferStats
    handshake: Handshake

    def take_stats(self) -> dict[str, float]:
        """Counters since the last call, with gauges when there is anything to say."""
        values = self.stats.take()
        return {**values, "messages_unacknowledged": self.publisher.outstanding()} if values else {}

    def close(self) -> None:
        """End the publisher, then the engine."""
        self.worker.close()
        self.publisher.close()
        self.engine.close()


@dataclass(slots=True)
class DecodeWorkerSide:
    """Decode's worker half with its engine and puller."""

    worker: DecodeWorker
    puller: Puller
    engine: TransferEngine
    stats: TransferStats
    handshake: Handshake
    offload_stats: Callable[[], Mapping[str, float]] = dict
    """Counters of sparse offload since the last call."""

    def take_stats(self) -> dict[str, float]:
        """Counters since the last call, with gauges when there is anything to say."""
        values = {**self.stats.take(), **self.offload_stats()}
        if not values:
            return {}
        children, parked, reads = self.puller.counts()
        return {**values, "children_pulling": children, "connections_parked": parked, "reads_in_flight": reads}

    def close(self) -> None:
        """End the puller, then the engine."""
        self.puller.close()
        self.engine.close()


def prefill_worker(facts: EngineFacts, kv_caches: Mapping[str, Any], beside_loaders: bool) -> PrefillWorkerSide:
    """Prefill's worker half over registered caches."""
    layout = cache_layout(kv_caches, facts.num_blocks, facts.base_layers)
    handshake = _handshake(facts, layout, kv_caches)
    engine = _engine(facts, kv_caches)
    engine.initialize(EngineRole.PREFILL)
    engine.register_memory([MemoryRegion(address, length) for address, length in storage_regions(kv_caches)])
    rank, config = vllm_compat.tp_rank(), facts.config
    slots = layer_slots(layout)
    memory = SourceMemory(
        engine.session(),
        encode_layer_map(layout),
        [layer.name for layer in layout.layers],
        slots,
        PeerInfo(
            WIRE_VERSION,
            handshake.generation,
            handshake.contract.fingerprint(),
            facts.sizes.tp_size,
            rank,
            round(config.peer_timeout_s * 1000),
            joint_acks=True,
        ),
    )
    stats = TransferStats()
    made: list[PrefillWorker] = []  # worker and publisher know each other
    publisher = Publisher(
        memory,
        PublisherOptions(
            config.peer_timeout_s,
            config.connect_timeout_s,
            config.handshake_timeout_s,
            config.legacy_ack_timeout_s,
            config.cpus_of(rank),
        ),
        stats,
        lambda refusals: made[0].on_failure(refusals),
    )
    worker = PrefillWorker(
        layout,
        slots,
        rank,
        facts.sizes.tp_size,
        publisher,
        stats,
        Timeline.from_environment("P"),
        event_recorder(cache_device(kv_caches)),
        beside_loaders,
    )
    made.append(worker)
    publisher.start()
    return PrefillWorkerSide(worker, publisher, engine, stats, handshake)


def decode_worker(facts: EngineFacts, kv_caches: Mapping[str, Any]) -> DecodeWorkerSide:
    """Decode's worker half over registered caches. The destination is its own paged cache, or a shared host pool."""
    rank, config, sizes = vllm_compat.tp_rank(), facts.config, facts.sizes
    offload_stats: Callable[[], Mapping[str, float]] = dict
    if facts.offload:
        manager = find_manager()
        layout = offload_layout(manager, kv_caches, facts.num_blocks, facts.base_layers)
        destination = offload_destination(layout, rank, sizes.tp_size)
        # vllm-ascend's manager counts nothing.
        offload_stats = getattr(manager, "take_stats", dict)
    else:
        layout = cache_layout(kv_caches, facts.num_blocks, facts.base_layers)
        destination = Destination(layout, rank, sizes.tp_size, split_main=False)
    handshake = _handshake(facts, layout, kv_caches)
    engine = _engine(facts, kv_caches)
    engine.initialize(EngineRole.DECODE)
    stats = TransferStats()
    options = PullerOptions(
        bind_host=config.bind_host or facts.host,
        port=facts.base_port + rank,
        generation=handshake.generation,
        fingerprint=handshake.contract.fingerprint(),
        tp_size=sizes.tp_size,
        peer_timeout_s=config.peer_timeout_s,
        park_timeout_s=config.park_timeout_s,
        idle_timeout_s=config.idle_timeout_s,
        hold_s=config.hold_s,
        read_threads=config.read_threads,
        max_connections=config.max_connections,
        require_registered=config.require_registered_prefill and config.meta_service is not None,
        legacy_hosts=config.legacy_prefill_hosts,
        cpus=config.cpus_of(rank),
    )
    puller = Puller(options, destination, engine, stats, Timeline.from_environment("D"))
    puller.start()
    return DecodeWorkerSide(DecodeWorker(puller), puller, engine, stats, handshake, offload_stats)


def _handshake(facts: EngineFacts, layout: CacheLayout, kv_caches: Mapping[str, Any]) -> Handshake:
    generation = vllm_compat.broadcast_from_rank0(secrets.randbits(63) | 1)
    return Handshake(generation, facts.contract(layout, kv_dtype(kv_caches)))


def _engine(facts: EngineFacts, kv_caches: Mapping[str, Any]) -> TransferEngine:
    config = facts.config
    options: EngineOptions | None = None
    if config.transfer_backend == "memfabric":
        options = MemfabricOptions(
            facts.host,
            device_index(kv_caches),
            MemfabricProtocol.parse(config.memfabric_transfer_protocol),
            config.memfabric_store_url,
        )
    engine = create_engine(config.transfer_backend, options)
    return SuppressedReads(engine) if config.debug_suppress_reads else engine
