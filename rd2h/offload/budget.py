"""Memory arithmetic of sparse Decode offload: host pages, device pages, hot buffer. Exact, in bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from rd2h.errors import ConfigError
from rd2h.offload.config import GIB, SECTION, SparseOffloadConfig


def host_to_device_ratio(main_page_bytes: Sequence[int], device_page_bytes: Sequence[int]) -> Fraction:
    """Host bytes needed for each device byte.

    ``main_page_bytes``: bytes of one block of main K and V, per layer that keeps them on the host.
    ``device_page_bytes``: bytes of one block of indexer and scale, per layer that has an indexer.
    Raises ConfigError without device pages: then nothing would bound the number of blocks.
    """
    device, host = sum(device_page_bytes), sum(main_page_bytes)
    if device < 1 or host < 1:
        raise ConfigError(f"{SECTION}: {host} host and {device} device bytes a block; both must be positive")
    return Fraction(host, device)


def needed_host_bytes(available_device_bytes: int, ratio: Fraction) -> int:
    """Host bytes for the main KV of as many blocks as the device can index (rounded up)."""
    return -(-available_device_bytes * ratio.numerator // ratio.denominator)


@dataclass(frozen=True, slots=True)
class Budget:
    """How the memory of one rank is divided."""

    device_bytes: int
    """Device memory for paged caches."""
    host_bytes: int
    """Host memory for main KV."""
    num_blocks: int
    total_bytes: int
    """What vLLM's ordinary division by bytes per block must see as available."""


def plan_budget(
    config: SparseOffloadConfig,
    available_device_bytes: int,
    main_page_bytes: Sequence[int],
    device_page_bytes: Sequence[int],
    hot_bytes: int = 0,
) -> Budget:
    """Divides the memory that profiling left over; ``hot_bytes`` are the hot buffers of all layers.

    With ``keep_device_kv_cache`` main lies on the device too, so nothing is won: the blocks follow from device memory
    alone and the host needs main's part of it. Raises ConfigError with both numbers when either memory is too small.
    """
    ratio = host_to_device_ratio(main_page_bytes, device_page_bytes)
    device = available_device_bytes - hot_bytes
    if device <= 0:
        raise ConfigError(
            f"{SECTION}.topk_buffer_size={config.topk_buffer_size}: hot buffers need {hot_bytes} bytes, "
            f"{available_device_bytes} bytes of device memory are available",
            key="topk_buffer_size",
        )
    main, block = sum(main_page_bytes), sum(device_page_bytes)
    num_blocks = device // (block + main if config.keep_device_kv_cache else block)
    check_dram(config, num_blocks * main)
    if config.keep_device_kv_cache:
        return Budget(device, num_blocks * main, num_blocks, device)
    host = needed_host_bytes(device, ratio)
    return Budget(device, host, num_blocks, device + host)


def check_dram(config: SparseOffloadConfig, needed_bytes: int) -> None:
    """Raises ConfigError with both numbers when the pool would be larger than the user allows."""
    if needed_bytes > config.dram_bytes:
        raise ConfigError(
            f"{SECTION}.dram_size_per_dp_GB={config.dram_size_per_dp_gib} is too small: main KV needs {needed_bytes} "
            f"bytes ({needed_bytes / GIB:.3f} GiB), allowed are {config.dram_bytes} bytes; raise it, or give the "
            "engine fewer blocks",
            key="dram_size_per_dp_GB",
        )


def decode_rows(max_num_batched_tokens: int, max_num_seqs: int, num_speculative_tokens: int = 0) -> int:
    """Rows of the hot buffer: the most tokens that one decode step can carry."""
    return min(max_num_batched_tokens, max_num_seqs * (1 + num_speculative_tokens))


def hot_buffer_bytes(rows: int, topk_buffer_size: int, kv_lora_rank: int, rope_dim: int, itemsize: int) -> int:
    """Device bytes of one layer's hot buffer, K and V together."""
    return rows * topk_buffer_size * (kv_lora_rank + rope_dim) * itemsize
