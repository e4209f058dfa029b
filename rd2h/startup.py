"""Rules of an engine's configuration beyond the connector's own settings. All raise a one-line ConfigError.

They hold before anything is allocated: what passes here may still be refused by a peer (see ``rd2h.layout.Contract``).
"""

from collections.abc import Mapping
from typing import Any

from rd2h.config import ConnectorConfig, advertised_host
from rd2h.cpus import check_cpus
from rd2h.errors import ConfigError, TopologyError
from rd2h.topology import MAX_PORT, TpMapping, base_port

ROLES = ("kv_producer", "kv_consumer")
OFFLOAD_ENABLED = "additional_config.sparse_kv_offload_config.enabled"


def is_producer(kv_role: object) -> bool:
    """Prefill or Decode; one engine is never both."""
    if kv_role not in ROLES:
        raise ConfigError.bad_value("kv_role", kv_role, ROLES)
    return kv_role == "kv_producer"


def reachable_host(config: ConnectorConfig, found: str) -> str:
    """Address for peers: ``advertise_host``, or what vLLM ``found`` (a wildcard on a machine without a network)."""
    if config.advertise_host is not None:
        return config.advertise_host
    return advertised_host("advertise_host (from VLLM_HOST_IP or this host's address)", found)


def decode_base_port(kv_port: int, dp_rank: int, dp_size: int, tp_size: int) -> int:
    """First connector port of this Decode engine; every port of every data-parallel rank must exist."""
    ranks = max(dp_size, dp_rank + 1)
    highest = MAX_PORT - ranks * tp_size + 1
    if not 1 <= kv_port <= highest:
        raise TopologyError(
            f"kv_port={kv_port} is not allowed; expected 1..{highest}: data-parallel size {ranks} x "
            f"tensor-parallel size {tp_size} take consecutive ports up to {MAX_PORT}",
            key="kv_port",
        )
    return base_port(kv_port, dp_rank, tp_size)


def check_pairing(config: ConnectorConfig, producer: bool, tp_size: int) -> None:
    """Tensor-parallel sizes of both roles, as far as they are configured."""
    own_key, own = (
        ("prefill_tp_size", config.prefill_tp_size) if producer else ("decode_tp_size", config.decode_tp_size)
    )
    if own is not None and own != tp_size:
        raise ConfigError.bad_value(own_key, own, f"this engine's tensor-parallel size {tp_size}")
    peer_key, peer = (
        ("decode_tp_size", config.decode_tp_size) if producer else ("prefill_tp_size", config.prefill_tp_size)
    )
    if peer is None:
        return
    try:
        TpMapping.of(tp_size if producer else peer, peer if producer else tp_size)
    except TopologyError as error:
        allowed = f"a divisor of {tp_size}" if producer else f"a multiple of {tp_size}"
        raise TopologyError(f"{peer_key}={peer} is not allowed; expected {allowed}: {error}", key=peer_key) from None


def check_processors(config: ConnectorConfig, tp_size: int) -> None:
    """Processors must be usable, and given once for all ranks or once for each. Raises ConfigError."""
    sets = config.data_path_cpus
    if len(sets) > 1 and len(sets) != tp_size:
        raise ConfigError.bad_value(
            "data_path_cpus", f"{len(sets)} lists", f"one list, or one for each of the {tp_size} tensor-parallel ranks"
        )
    check_cpus("data_path_cpus", sorted({cpu for cpus in sets for cpu in cpus}))


def check_microbatches(parallel_config: Any, producer: bool) -> None:
    """Prefill publishes a layer at its first hook; with microbatches that comes before the others have written."""
    if producer and getattr(parallel_config, "use_ubatching", False):
        raise ConfigError(
            "microbatches (--enable-dbo, --ubatch-size) are not supported on Prefill: layers are published one by one",
            key="parallel_config",
        )


def check_load_failures(policy: str, *, producer: bool, siblings: bool, offload: bool) -> None:
    """Where vLLM may compute a prompt anew whose load failed; ``siblings``: another connector may load beside ours."""
    if policy == "fail":
        return
    if producer and siblings:
        # vLLM hears of the failed load after the step, and what the step published cannot be taken back.
        allowed = "'fail' on Prefill beside another connector: Decode has read the blocks before they are computed anew"
        raise ConfigError.bad_value("kv_load_failure_policy", policy, allowed)
    if offload:
        # Decode has no device cache into which it could compute a prompt anew.
        raise ConfigError.bad_value("kv_load_failure_policy", policy, "'fail' with sparse offload")


def offload_enabled(additional_config: object) -> bool:
    """Whether vLLM's ``additional_config`` switches sparse offload on; anything but a map has no such section."""
    from rd2h.offload.config import SparseOffloadConfig

    return SparseOffloadConfig.read(additional_config if isinstance(additional_config, Mapping) else None).enabled


def check_offload_side(enabled: bool, producer: bool, *, sparse_on_npu: bool) -> None:
    """Sparse offload belongs on Decode alone, and a sparse model over MemFabric (``sparse_on_npu``) needs it there."""
    if producer and enabled:
        raise ConfigError.bad_value(
            OFFLOAD_ENABLED, True, "no sparse_kv_offload_config on Prefill (kv_role kv_producer)"
        )
    if not producer and sparse_on_npu and not enabled:
        raise ConfigError.bad_value(
            OFFLOAD_ENABLED, False, "true on Decode (kv_role kv_consumer) for a sparse-attention model"
        )
