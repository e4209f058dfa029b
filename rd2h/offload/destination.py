"""Decode's destination with a host pool: main goes to the pool, indexer and scale into the registered caches.

Reads only the attributes that vllm-ascend's manager has too, so either manager serves: ours, or theirs.
"""

import itertools
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rd2h.caches import tensor_layout
from rd2h.decode.destination import Destination
from rd2h.errors import ConfigError, LayoutError
from rd2h.layout import CacheLayout, TensorLayout, assemble, is_indexer_name

FOREIGN_PACKAGE = "vllm_ascend"
ACCESSOR = "get_sparse_kv_offload_manager"
ATTRIBUTES = ("offload_layer_names", "gvas_k_bases", "gvas_v_bases", "cpu_block_lens", "_get_offload_layer_id")


class PoolOwner(Protocol):
    """What is read of a manager. Lists are indexed by ``_get_offload_layer_id``."""

    @property
    def offload_layer_names(self) -> Sequence[str]:
        """Layers whose main KV lies in the pool."""
        ...

    @property
    def gvas_k_bases(self) -> Sequence[int]:
        """Address of each layer's K."""
        ...

    @property
    def gvas_v_bases(self) -> Sequence[int]:
        """Address of each layer's V."""
        ...

    @property
    def cpu_block_lens(self) -> Sequence[Any]:
        """Bytes of a block: a (K, V) pair for each layer, or one pair of numbers for all layers."""
        ...

    def _get_offload_layer_id(self, layer_name: str) -> int: ...


def find_manager() -> PoolOwner:
    """The manager of this process: ours if there is one, else vllm-ascend's. Raises ConfigError when there is none."""
    ours = sys.modules.get("rd2h.offload.manager")
    if ours is not None and ours.current_manager() is not None:
        return _checked(ours.current_manager())
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] == FOREIGN_PACKAGE and callable(getattr(module, ACCESSOR, None)):
            return _checked(getattr(module, ACCESSOR)())
    raise ConfigError(
        "sparse_kv_offload_config.enabled, but this worker has no sparse offload manager; use a worker that makes one "
        "before it registers its caches",
        key="sparse_kv_offload_config",
    )


def _checked(manager: Any) -> PoolOwner:
    missing = [name for name in ATTRIBUTES if not hasattr(manager, name)]
    if missing:
        raise ConfigError(f"the sparse offload manager {type(manager).__name__} has no {', '.join(missing)}")
    owner: PoolOwner = manager
    return owner


def offload_layout(manager: PoolOwner, kv_caches: Mapping[str, Any], num_blocks: int, base_layers: int) -> CacheLayout:
    """Layout of a rank: K and V of every offloaded layer from ``manager``, indexers from the registered caches.

    Registered main caches are ignored: what they hold is the manager's business. Raises LayoutError.
    """
    described = {name: _main(manager, name, num_blocks) for name in manager.offload_layer_names}
    _check_apart(described)
    for name, cache in kv_caches.items():
        if is_indexer_name(name):
            tensors = cache if isinstance(cache, tuple | list) else (cache,)
            described[name] = [tensor_layout(name, tensor, num_blocks) for tensor in tensors if tensor is not None]
        elif name not in described:
            raise LayoutError(f"{name!r} is registered, but the sparse offload manager does not hold its main KV")
    return assemble(described, 2, base_layers)


def offload_destination(layout: CacheLayout, rank: int, tp_size: int) -> Destination:
    """The destination of one Decode rank over ``offload_layout``: ranks pull disjoint shares of main."""
    return Destination(layout, rank, tp_size, split_main=True)


def _main(manager: PoolOwner, name: str, num_blocks: int) -> list[TensorLayout]:
    layer = manager._get_offload_layer_id(name)
    lengths = _block_lengths(manager.cpu_block_lens, layer, len(manager.offload_layer_names))
    bases = (int(manager.gvas_k_bases[layer]), int(manager.gvas_v_bases[layer]))
    if min(*lengths, *bases) < 1:
        raise LayoutError(f"{name!r}: pool addresses {bases} with blocks of {lengths} bytes; all must be positive")
    return [TensorLayout(base, length, num_blocks) for base, length in zip(bases, lengths, strict=True)]


def _check_apart(mains: Mapping[str, Sequence[TensorLayout]]) -> None:
    parts = sorted((tensor.base_addr, tensor.end_addr, name) for name, tensors in mains.items() for tensor in tensors)
    for (_, end, name), (begin, _, other) in itertools.pairwise(parts):
        if end > begin:
            blocks = mains[name][0].num_blocks
            raise LayoutError(
                f"the pool's part of {name!r} of {blocks} blocks overlaps that of {other!r}: the sparse offload "
                "manager was made for fewer blocks than the engine has"
            )


def _block_lengths(lengths: Sequence[Any], layer: int, layers: int) -> tuple[int, int]:
    if len(lengths) == layers and all(hasattr(entry, "__len__") and len(entry) == 2 for entry in lengths):
        return int(lengths[layer][0]), int(lengths[layer][1])
    if len(lengths) == 2 and all(isinstance(entry, int) for entry in lengths):
        return int(lengths[0]), int(lengths[1])
    raise LayoutError(f"cpu_block_lens has {len(lengths)} entries like {lengths[:1]!r}; expected a (K, V) pair a layer")
