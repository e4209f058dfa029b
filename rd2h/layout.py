"""KV-cache layout: what lies where, in which byte lengths, and which layers share a physical buffer.

Address of external block ``b`` of a tensor = ``base_addr + b * block_bytes``. Tensor order of a layer is main tensors,
then the indexer, then the LIC8 scale.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from rd2h.errors import LayoutError, WireError
from rd2h.wire.unpacking import shown, unpack

MAX_LAYERS = 4096
MAX_MAIN_TENSORS = 8
MAX_LISTS_PER_LAYER = 16
MAX_ADDRESS = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One cache tensor. ``num_blocks`` is 0 where unknown (a peer does not say)."""

    base_addr: int
    block_bytes: int
    num_blocks: int = 0

    @property
    def end_addr(self) -> int:
        """One past the last byte."""
        return self.base_addr + self.block_bytes * self.num_blocks


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """Cache tensors of one layer."""

    name: str
    main: tuple[TensorLayout, ...]
    indexer: TensorLayout | None = None
    scale: TensorLayout | None = None

    @property
    def indexer_tensors(self) -> tuple[TensorLayout, ...]:
        """Indexer and scale, where present: both follow the indexer's block ids."""
        return tuple(tensor for tensor in (self.indexer, self.scale) if tensor is not None)

    @property
    def tensors(self) -> tuple[TensorLayout, ...]:
        """All tensors in wire order."""
        return self.main + self.indexer_tensors

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all tensors."""
        return sum(tensor.block_bytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """All cache-bearing layers of one rank in execution order, MTP layers included."""

    layers: tuple[LayerLayout, ...]

    def __post_init__(self) -> None:
        if not self.layers:
            raise LayoutError("no cache-bearing layer was registered")
        names = [layer.name for layer in self.layers]
        if len(set(names)) != len(names):
            raise LayoutError("a layer name occurs twice")

    def index_of(self) -> dict[str, int]:
        """Layer name to position."""
        return {layer.name: index for index, layer in enumerate(self.layers)}

    @property
    def has_indexer(self) -> bool:
        """Whether any layer has an indexer cache."""
        return any(layer.indexer is not None for layer in self.layers)


# --- building from registered caches ------------------------------------------------------------------------------

_LAYER_NUMBER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")
_MTP_NUMBER = re.compile(r"(?:^|\.)mtp(?:\.layers)?\.(\d+)(?:\.|$)")
_ANY_NUMBER = re.compile(r"\d+")


def layer_number(name: str, base_layers: int) -> int:
    """Execution position of a layer from its name; an MTP layer N comes at ``base_layers + N``."""
    if (found := _MTP_NUMBER.search(name)) is not None:
        return base_layers + int(found.group(1))
    if (found := _LAYER_NUMBER.search(name)) is not None:
        return int(found.group(1))
    any_number = _ANY_NUMBER.search(name)
    return int(any_number.group()) if any_number else 0


def is_indexer_name(name: str) -> bool:
    """Whether a registered cache of its own belongs to an indexer."""
    return "indexer" in name


def assemble(caches: Mapping[str, Sequence[TensorLayout]], main_tensor_count: int, base_layers: int) -> CacheLayout:
    """Layers from registered caches, whatever the order of registration or of vLLM's cache groups.

    A layer's main cache is registered under its own name with ``main_tensor_count`` tensors; an indexer (and its scale)
    follows in the same tuple, or is registered by itself under a name that contains "indexer" and has the same layer
    number. Raises LayoutError when the pieces do not fit.
    """
    mains: dict[int, tuple[str, Sequence[TensorLayout]]] = {}
    indexers: dict[int, Sequence[TensorLayout]] = {}
    for name, tensors in caches.items():
        number = layer_number(name, base_layers)
        if is_indexer_name(name):
            if number in indexers:
                raise LayoutError(f"layer {number} has two indexer caches; the second is {name!r}")
            indexers[number] = tensors
        elif number in mains:
            raise LayoutError(f"layer {number} has two main caches: {mains[number][0]!r} and {name!r}")
        else:
            mains[number] = (name, tensors)
    layers = []
    for number in sorted(mains):
        name, tensors = mains[number]
        if len(tensors) < main_tensor_count:
            raise LayoutError(f"{name!r}: {len(tensors)} tensors registered, {main_tensor_count} main tensors expected")
        extra = (*tensors[main_tensor_count:], *indexers.pop(number, ()))
        if len(extra) > 2:
            raise LayoutError(f"{name!r}: {len(extra)} tensors besides main, at most indexer and scale expected")
        indexer, scale = (*extra, None, None)[:2]
        layers.append(LayerLayout(name, tuple(tensors[:main_tensor_count]), indexer, scale))
    if indexers:
        raise LayoutError(f"indexer caches of layers {sorted(indexers)} have no main cache")
    return CacheLayout(tuple(layers))


# --- what two engines must agree on -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Contract:
    """Everything that Prefill and Decode must agree on and that does not depend on tensor parallelism."""

    wire_version: int
    transfer_backend: str
    transfer_protocol: str
    model: str
    kv_dtype: str
    block_size_tokens: int
    layers: tuple[tuple[str, tuple[int, ...], int, int], ...]
    """(name, main block bytes, indexer block bytes or 0, scale block bytes or 0) in execution order."""

    def fingerprint(self) -> bytes:
        """SHA-256 over the canonical form."""
        canonical = (
            self.wire_version,
            self.transfer_backend,
            self.transfer_protocol,
            self.model,
            self.kv_dtype,
            self.block_size_tokens,
            self.layers,
        )
        packed: bytes = msgpack.packb(canonical, use_bin_type=True)
        return hashlib.sha256(packed).digest()


def contract_layers(layout: CacheLayout) -> tuple[tuple[str, tuple[int, ...], int, int], ...]:
    """The part of ``Contract`` that comes from the caches."""
    return tuple(
        (
            layer.name,
            tuple(tensor.block_bytes for tensor in layer.main),
            layer.indexer.block_bytes if layer.indexer else 0,
            layer.scale.block_bytes if layer.scale else 0,
        )
        for layer in layout.layers
    )


def check_source(source: LayerLayout, destination: LayerLayout) -> None:
    """Validate a Prefill layer against Decode's own; raises LayoutError naming field and both values."""
    name = destination.name
    if len(source.main) != len(destination.main):
        raise LayoutError(
            f"{name!r}: main tensor count {len(source.main)} on Prefill, {len(destination.main)} on Decode"
        )
    for index, (theirs, ours) in enumerate(zip(source.main, destination.main, strict=True)):
        if theirs.block_bytes != ours.block_bytes:
            raise LayoutError(
                f"{name!r}: main tensor {index} block bytes {theirs.block_bytes} on Prefill, "
                f"{ours.block_bytes} on Decode"
            )
    for what, theirs_opt, ours_opt in (
        ("indexer", source.indexer, destination.indexer),
        ("scale", source.scale, destination.scale),
    ):
        if (theirs_opt is None) != (ours_opt is None):
            sides = ("absent", "present") if theirs_opt is None else ("present", "absent")
            raise LayoutError(f"{name!r}: {what} is {sides[0]} on Prefill and {sides[1]} on Decode")
        if theirs_opt is not None and ours_opt is not None and theirs_opt.block_bytes != ours_opt.block_bytes:
            raise LayoutError(
                f"{name!r}: {what} block bytes {theirs_opt.block_bytes} on Prefill, {ours_opt.block_bytes} on Decode"
            )


# --- the layer map of ``mf_meta`` -----------------------------------------------------------------------------------


def encode_layer_map(layout: CacheLayout) -> bytes:
    """The ``encoded`` position of ``mf_meta``."""
    layers: dict[str, dict[str, Any]] = {}
    for layer in layout.layers:
        tensors = layer.tensors
        groups = [0] * len(layer.main) + [1] * (len(tensors) - len(layer.main))
        layers[layer.name] = {
            "base_addrs": [tensor.base_addr for tensor in tensors],
            "block_len": [tensor.block_bytes for tensor in tensors],
            "block_size_scale": [1] * len(tensors),
            "tensor_group_idx": groups,
            "main_tensor_count": len(layer.main),
            "has_indexer": layer.indexer is not None,
        }
    packed: bytes = msgpack.packb(layers, use_bin_type=True)
    return packed


def decode_layer_map(encoded: bytes) -> dict[str, LayerLayout]:
    """Layers that a Prefill described; raises LayoutError for anything malformed."""
    try:
        raw = unpack(encoded, "layer metadata", lists=MAX_LISTS_PER_LAYER * MAX_LAYERS, maps=MAX_LAYERS + 1)
    except WireError as error:
        raise LayoutError(str(error)) from error
    if not isinstance(raw, dict) or not 0 < len(raw) <= MAX_LAYERS:
        raise LayoutError(f"layer metadata must be a map of 1..{MAX_LAYERS} layers")
    return {name: _decode_layer(name, entry) for name, entry in raw.items()}


def _numbers(name: str, entry: Mapping[str, object], key: str, maximum: int) -> list[int]:
    values = entry.get(key)
    if not isinstance(values, list) or len(values) > MAX_MAIN_TENSORS + 2:
        raise LayoutError(f"{name!r}: {key} must be a list of at most {MAX_MAIN_TENSORS + 2} numbers")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= maximum:
            raise LayoutError(f"{name!r}: {key} must hold numbers of 0..{maximum}, got {shown(value)}")
    return values


def _decode_layer(name: object, entry: object) -> LayerLayout:
    if not isinstance(name, str) or not isinstance(entry, dict):
        raise LayoutError("layer metadata must map names to maps")
    addresses = _numbers(name, entry, "base_addrs", MAX_ADDRESS)
    lengths = _numbers(name, entry, "block_len", 1 << 40)
    scales = _numbers(name, entry, "block_size_scale", 1 << 20)
    if not len(addresses) == len(lengths) == len(scales):
        raise LayoutError(f"{name!r}: base_addrs, block_len and block_size_scale differ in length")
    main_count, has_indexer = entry.get("main_tensor_count"), entry.get("has_indexer")
    if isinstance(main_count, bool) or not isinstance(main_count, int) or not 1 <= main_count <= MAX_MAIN_TENSORS:
        raise LayoutError(f"{name!r}: main_tensor_count must be 1..{MAX_MAIN_TENSORS}, got {shown(main_count)}")
    if not isinstance(has_indexer, bool):
        raise LayoutError(f"{name!r}: has_indexer must be a boolean, got {shown(has_indexer)}")
    extra = len(addresses) - main_count
    if extra not in ((1, 2) if has_indexer else (0,)):
        raise LayoutError(f"{name!r}: {len(addresses)} tensors do not fit main_tensor_count {main_count}")
    tensors = []
    for address, length, scale in zip(addresses, lengths, scales, strict=True):
        if length * scale < 1:
            raise LayoutError(f"{name!r}: a tensor has blocks of 0 bytes")
        tensors.append(TensorLayout(address, length * scale))
    indexer, scale_tensor = (*tensors[main_count:], None, None)[:2]
    return LayerLayout(name, tuple(tensors[:main_count]), indexer, scale_tensor)


# --- physical slots -------------------------------------------------------------------------------------------------


def storage_slots(components: Sequence[Sequence[TensorLayout]]) -> list[int | None]:
    """Physical slot of each component (all main tensors, or all indexer tensors, of one layer), from addresses alone.

    Two components are in one slot when any of their bytes overlap. An empty component has no slot (None). Slot numbers
    are dense and follow the first component that uses them.
    """
    spans = sorted(
        (tensor.base_addr, tensor.end_addr, index)
        for index, tensors in enumerate(components)
        for tensor in tensors
        if tensor.num_blocks
    )
    parent = list(range(len(components)))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    reach, owner = -1, -1
    for begin, end, index in spans:
        if begin < reach:
            parent[root(index)] = root(owner)
        if end > reach:
            reach, owner = end, index
    numbers: dict[int, int] = {}
    return [numbers.setdefault(root(i), len(numbers)) if tensors else None for i, tensors in enumerate(components)]
