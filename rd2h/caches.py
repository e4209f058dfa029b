"""Layout of the KV caches that vLLM registered, read from the tensors themselves."""

from collections.abc import Mapping, Sequence
from typing import Any

from rd2h.errors import LayoutError
from rd2h.gates import Component, Slot
from rd2h.layout import CacheLayout, TensorLayout, assemble, is_indexer_name, storage_slots


def tensor_layout(name: str, tensor: Any, num_blocks: int) -> TensorLayout:
    """Layout of one cache tensor of ``num_blocks`` external blocks (a kernel may use smaller ones).

    Raises LayoutError when a block is not one contiguous stretch of memory.
    """
    if not tensor.is_contiguous():
        raise LayoutError(f"{name!r}: the cache of shape {tuple(tensor.shape)} is not contiguous")
    total = tensor.numel() * tensor.element_size()
    if num_blocks < 1 or total % num_blocks or tensor.shape[0] % num_blocks:
        raise LayoutError(f"{name!r}: a cache of shape {tuple(tensor.shape)} does not divide into {num_blocks} blocks")
    return TensorLayout(tensor.data_ptr(), total // num_blocks, num_blocks)


def cache_layout(kv_caches: Mapping[str, Any], num_blocks: int, base_layers: int) -> CacheLayout:
    """Layout of all registered caches; an entry is one tensor or a tuple of tensors (main K and V, indexer, scale)."""
    described = {
        name: [tensor_layout(name, tensor, num_blocks) for tensor in _tensors(cache)]
        for name, cache in kv_caches.items()
    }
    counts = {name: len(tensors) for name, tensors in described.items() if not is_indexer_name(name)}
    if not counts:
        raise LayoutError("no main KV cache was registered")
    # A single tensor holds K and V together; a tuple begins with K and V, whatever follows.
    main_tensor_count = min(2, min(counts.values()))
    return assemble(described, main_tensor_count, base_layers)


def layer_slots(layout: CacheLayout) -> list[tuple[Slot, ...]]:
    """Physical main and indexer slots of each layer, from storage addresses."""
    mains = storage_slots([layer.main for layer in layout.layers])
    indexers = storage_slots([layer.indexer_tensors for layer in layout.layers])
    slots = []
    for main, indexer in zip(mains, indexers, strict=True):
        pair = [Slot(Component.MAIN, main)] if main is not None else []
        if indexer is not None:
            pair.append(Slot(Component.INDEXER, indexer))
        slots.append(tuple(pair))
    return slots


def storage_regions(kv_caches: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(address, bytes) of every distinct storage under the caches: what a transfer engine registers."""
    storages = {}
    for cache in kv_caches.values():
        for tensor in _tensors(cache):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sorted(storages.items())


def kv_dtype(kv_caches: Mapping[str, Any]) -> str:
    """Data type of the first main cache, e.g. "bfloat16"."""
    for name, cache in kv_caches.items():
        if not is_indexer_name(name):
            return str(_tensors(cache)[0].dtype).removeprefix("torch.")
    raise LayoutError("no main KV cache was registered")


def cache_device(kv_caches: Mapping[str, Any]) -> Any:
    """The ``torch.device`` that the caches lie on; a host pool registered among them does not count."""
    devices = [tensor.device for cache in kv_caches.values() for tensor in _tensors(cache)]
    if not devices:
        raise LayoutError("no KV cache was registered")
    return next((device for device in devices if device.type != "cpu"), devices[0])


def device_index(kv_caches: Mapping[str, Any]) -> int:
    """Index of ``cache_device``; 0 for a device without one."""
    return int(cache_device(kv_caches).index or 0)


def _tensors(cache: Any) -> Sequence[Any]:
    if isinstance(cache, tuple | list):
        return [tensor for tensor in cache if tensor is not None]
    return [cache]
