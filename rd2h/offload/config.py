"""``sparse_kv_offload_config``: what the user may set, and every rule that the engine must fulfil for it.

Nothing here imports torch or vLLM. Every error is one line that names the setting, its value and what is allowed.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rd2h.errors import ConfigError

SECTION = "sparse_kv_offload_config"
DEFAULT_TOPK_BUFFER_SIZE = 4096
DEFAULT_DRAM_GIB = 128
GIB = 1 << 30
ASCEND_DTYPES = ("bfloat16",)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseOffloadConfig:
    """Settings of sparse Decode offload. When ``enabled`` is false the others have no meaning."""

    enabled: bool = False
    topk_buffer_size: int = DEFAULT_TOPK_BUFFER_SIZE
    """Token slots of a row in the device's hot buffer: at least ``index_topk``, a multiple of the block size."""
    dram_size_per_dp_gib: int = DEFAULT_DRAM_GIB
    """Host memory that one data-parallel rank may use for main KV, in GiB (the key ends in GB, as in the guide)."""
    keep_device_kv_cache: bool = False
    """Debugging only: main KV stays on the device as well."""

    @property
    def dram_bytes(self) -> int:
        """``dram_size_per_dp_gib`` in bytes."""
        return self.dram_size_per_dp_gib * GIB

    @classmethod
    def parse(
        cls,
        additional_config: Mapping[str, Any] | None,
        *,
        index_topk: int | None,
        block_size: int | None = None,
        kv_role: str = "kv_consumer",
        main_dtype: str | None = None,
        supported_dtypes: Sequence[str] = ASCEND_DTYPES,
        num_kv_heads: int = 1,
        cache_groups: int = 1,
        context_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        model_runner_v2: bool = False,
        compress_ratios: bool = False,
    ) -> "SparseOffloadConfig":
        """Settings from vLLM's ``additional_config``, checked against the engine.

        ``index_topk`` is the model's top-k (None: no sparse attention); ``block_size`` in tokens and ``main_dtype`` may
        be None while they are not known yet, then the call must be repeated. ``context_parallel_size`` is the product
        of the prefill and decode ones. ``compress_ratios``: the model's text config has such an attribute.
        Raises ConfigError.
        """
        config = cls.read(additional_config)
        if not config.enabled:
            return config
        if compress_ratios:
            raise ConfigError(f"{SECTION}: models with compress_ratios are not supported", key="compress_ratios")
        if not index_topk:
            raise ConfigError(
                f"{SECTION}: the model has no index_topk; only sparse-attention models can offload", key="index_topk"
            )
        if context_parallel_size != 1:
            raise _unsupported("context parallel size", context_parallel_size)
        if pipeline_parallel_size != 1:
            raise _unsupported("pipeline parallel size", pipeline_parallel_size)
        config._check_role(kv_role)
        if model_runner_v2:
            raise ConfigError(f"{SECTION} needs model runner V1; V2 is not supported", key="model_runner")
        config._check_buffer(index_topk, block_size)
        if main_dtype is not None and main_dtype not in supported_dtypes:
            raise ConfigError.bad_value("main KV dtype", main_dtype, supported_dtypes)
        if num_kv_heads != 1:
            raise _unsupported("num_kv_heads", num_kv_heads)
        if cache_groups != 1:
            raise _unsupported("number of KV cache groups", cache_groups)
        for flag in ("enable_sparse_sfa_c8", "enable_dsa_cp"):
            if (additional_config or {}).get(flag):
                raise ConfigError(f"{flag}=True cannot be combined with {SECTION}.enabled", key=flag)
        return config

    @classmethod
    def read(cls, additional_config: Mapping[str, Any] | None) -> "SparseOffloadConfig":
        """The section alone: keys and types, no rules about the engine. Raises ConfigError."""
        # vLLM also takes objects here, for platforms that know them; those hold no section of ours.
        section = additional_config.get(SECTION) if isinstance(additional_config, Mapping) else None
        if section is None:
            return cls()
        if not isinstance(section, Mapping):
            raise ConfigError.bad_value(SECTION, section, "a map")
        for key in section:
            if key not in KEYS:
                raise ConfigError.bad_value(f"{SECTION}.{key}", section[key], f"known keys {sorted(KEYS)}")
        if not _boolean("enabled", section.get("enabled", False)):
            return cls()
        return cls(
            enabled=True,
            topk_buffer_size=_positive("topk_buffer_size", section.get("topk_buffer_size", DEFAULT_TOPK_BUFFER_SIZE)),
            dram_size_per_dp_gib=_positive(
                "dram_size_per_dp_GB", section.get("dram_size_per_dp_GB", DEFAULT_DRAM_GIB), "GiB, a whole number >= 1"
            ),
            keep_device_kv_cache=_boolean("keep_device_kv_cache", section.get("keep_device_kv_cache", False)),
        )

    def _check_role(self, kv_role: str) -> None:
        if self.keep_device_kv_cache:
            logger.warning("%s.keep_device_kv_cache is for debugging: no device memory is saved", SECTION)
        elif kv_role != "kv_consumer":
            raise ConfigError(
                f"{SECTION}.enabled with kv_role={kv_role!r}: only a Decode engine (kv_consumer) can offload",
                key="kv_role",
            )

    def _check_buffer(self, index_topk: int, block_size: int | None) -> None:
        size, key = self.topk_buffer_size, f"{SECTION}.topk_buffer_size"
        if size < index_topk:
            raise ConfigError.bad_value(key, size, f"at least index_topk={index_topk}")
        if block_size is not None and (block_size < 1 or size % block_size):
            raise ConfigError.bad_value(key, size, f"a multiple of block_size={block_size}")


KEYS = frozenset({"enabled", "topk_buffer_size", "dram_size_per_dp_GB", "keep_device_kv_cache"})


def _boolean(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError.bad_value(f"{SECTION}.{key}", value, "true or false")
    return value


def _positive(key: str, value: object, allowed: str = "a whole number >= 1") -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 31:
        raise ConfigError.bad_value(f"{SECTION}.{key}", value, allowed)
    return value


def _unsupported(what: str, value: int) -> ConfigError:
    return ConfigError(f"{SECTION}: {what} {value} is not supported; it must be 1", key=what)
