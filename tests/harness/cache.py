"""Small KV caches in NumPy memory whose every word tells where it came from."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rd2h.gates import Component, Slot
from rd2h.layout import CacheLayout, LayerLayout, TensorLayout, storage_slots

Words = NDArray[np.uint64]
CANARY = 0xCA9A27
"""Content of every block that nobody has written."""
OVERWRITTEN = 0xBADBAD
"""Content that Prefill writes into a block after Decode must have read it."""


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """Shape of a cache; byte lengths are of one block and multiples of 8. ``buffers`` 0: one set a layer."""

    layers: int = 4
    blocks: int = 64
    main_bytes: tuple[int, ...] = (256, 64)
    indexer_bytes: int = 64
    scale_bytes: int = 0
    buffers: int = 0

    @property
    def tensor_bytes(self) -> tuple[int, ...]:
        """Block bytes of all tensors in wire order."""
        return self.main_bytes + tuple(size for size in (self.indexer_bytes, self.scale_bytes) if size)


@dataclass(frozen=True, slots=True)
class Block:
    """Block ``block`` holds block ``position`` of the prompt with number ``content``."""

    block: int
    content: int
    position: int


@dataclass(slots=True)
class Expected:
    """What Decode's memory must hold; every block that is not named must hold the canary."""

    main: list[Block] = field(default_factory=list)
    indexer: list[Block] = field(default_factory=list)


def words_of(content: int, position: int, layer: int, tensor: int, count: int) -> Words:
    """The words of one block: uint64[count]; no two blocks share one."""
    first = (content << 40) ^ (position << 24) ^ (layer << 16) ^ (tensor << 12)
    return np.uint64(first) + np.arange(count, dtype=np.uint64)


class Cache:
    """Memory of one rank. Layers ``i`` and ``j`` share their buffers when they are equal modulo ``spec.buffers``."""

    def __init__(self, spec: CacheSpec, shared_main: "Cache | None" = None) -> None:
        self.spec = spec
        sets = spec.buffers or spec.layers
        self.buffers: list[list[Words]] = [
            [np.zeros((spec.blocks, size // 8), np.uint64) for size in spec.tensor_bytes] for _ in range(sets)
        ]
        if shared_main is not None:
            for own, shared in zip(self.buffers, shared_main.buffers, strict=True):
                own[: len(spec.main_bytes)] = shared[: len(spec.main_bytes)]

    def layout(self) -> CacheLayout:
        """The layout for publisher and puller."""
        layers = []
        for index in range(self.spec.layers):
            tensors = [
                TensorLayout(int(buffer.ctypes.data), size, self.spec.blocks)
                for buffer, size in zip(self.tensors(index), self.spec.tensor_bytes, strict=True)
            ]
            count = len(self.spec.main_bytes)
            indexer, scale = (*tensors[count:], None, None)[:2]
            layers.append(LayerLayout(f"model.layers.{index}.self_attn.attn", tuple(tensors[:count]), indexer, scale))
        return CacheLayout(tuple(layers))

    def slots(self) -> list[tuple[Slot, ...]]:
        """Physical slots of each layer, from addresses."""
        layers = self.layout().layers
        main = storage_slots([layer.main for layer in layers])
        indexer = storage_slots([layer.indexer_tensors for layer in layers])
        return [
            tuple(
                Slot(component, number)
                for component, number in ((Component.MAIN, a), (Component.INDEXER, b))
                if number is not None
            )
            for a, b in zip(main, indexer, strict=True)
        ]

    def tensors(self, layer: int) -> list[Words]:
        """Buffers of one layer."""
        return self.buffers[layer % len(self.buffers)]

    def write(self, layer: int, component: Component, blocks: Iterable[Block]) -> None:
        """Fill blocks of one layer with their content."""
        for tensor in self._tensors_of(component):
            buffer = self.tensors(layer)[tensor]
            for item in blocks:
                buffer[item.block] = words_of(item.content, item.position, layer, tensor, buffer.shape[1])

    def fill_canary(self) -> None:
        """Every block gets the canary content."""
        for layer in range(self.spec.layers):
            for component in Component:
                self.write(layer, component, [Block(b, CANARY, b) for b in range(self.spec.blocks)])

    def differences(self, expected: Expected, components: Iterable[Component] = tuple(Component)) -> list[str]:
        """Blocks that hold anything but what is expected, in words; at most 20."""
        found: list[str] = []
        for layer in range(self.spec.layers):
            for component in components:
                named = expected.main if component is Component.MAIN else expected.indexer
                blocks = {b: Block(b, CANARY, b) for b in range(self.spec.blocks)}
                blocks.update({item.block: item for item in named})
                for tensor in self._tensors_of(component):
                    buffer = self.tensors(layer)[tensor]
                    count = buffer.shape[1]
                    want = np.stack([words_of(i.content, i.position, layer, tensor, count) for i in blocks.values()])[
                        np.argsort(list(blocks))
                    ]
                    for block in np.flatnonzero(np.any(buffer != want, axis=1)):
                        found.append(
                            f"layer {layer} tensor {tensor} block {block}: content {int(buffer[block, 0]) >> 40:#x}, "
                            f"expected {blocks[int(block)].content:#x}"
                        )
        return found[:20]

    def holds(self, layer: int, tensor: int, item: Block) -> bool:
        """Whether one block of one tensor holds its content."""
        buffer = self.tensors(layer)[tensor]
        want = words_of(item.content, item.position, layer, tensor, buffer.shape[1])
        return bool(np.array_equal(buffer[item.block], want))

    def _tensors_of(self, component: Component) -> range:
        count = len(self.spec.main_bytes)
        return range(count) if component is Component.MAIN else range(count, len(self.spec.tensor_bytes))
