"""Who runs first in a layer's hooks, and who waits before a shared layer buffer is written again.

A *provider* knows when a layer's physical buffers may be overwritten: ``supports_layerwise_buffer_reuse`` is true and
``wait_for_layer_reuse(layer_idx)`` waits. A *sink* writes into those buffers from its own threads: it takes over the
wait when its ``set_external_slot_release_waiter(fn)`` does not answer False, and then calls ``fn(layer_idx)`` before it
writes. Members are plain objects here; nothing of vLLM is needed.
"""

from collections.abc import Callable, Sequence
from typing import Any

LayerHook = Callable[..., object]
SlotWaiter = Callable[[int], None]


def is_provider(connector: Any) -> bool:
    """Whether a connector can say when a layer's buffers are free."""
    return getattr(connector, "supports_layerwise_buffer_reuse", False) is True and callable(
        getattr(connector, "wait_for_layer_reuse", None)
    )


class LayerPhases:
    """Order of the members of one composite, fixed at construction, and the hand-over of the wait to sinks."""

    def __init__(self, connectors: Sequence[Any]) -> None:
        providers = [connector for connector in connectors if is_provider(connector)]
        self._siblings = [connector for connector in connectors if connector not in providers]
        self._ordered = [*providers, *self._siblings]
        self._reuse_waits: list[SlotWaiter] = [provider.wait_for_layer_reuse for provider in providers]
        self.providers = tuple(providers)
        self.sinks = tuple(self._hand_over()) if providers else ()

    def wait_for_slot(self, layer_idx: int) -> None:
        """Every provider in turn: returns when all say that the layer's buffers may be overwritten. Any thread."""
        for wait in self._reuse_waits:
            wait(layer_idx)

    def loaders(self, hook: str) -> list[LayerHook]:
        """Methods to call before a layer: providers first, or not at all when a sink owns the wait."""
        return self._methods(self._siblings if self.sinks else self._ordered, hook)

    def writers(self, hook: str) -> list[LayerHook]:
        """Methods to call after a layer: providers first, so that their gates are closed when the siblings run."""
        return self._methods(self._ordered, hook)

    def _hand_over(self) -> list[Any]:
        takers = []
        for sibling in self._siblings:
            take = getattr(sibling, "set_external_slot_release_waiter", None)
            if callable(take) and take(self.wait_for_slot) is not False:
                takers.append(sibling)
        return takers

    @staticmethod
    def _methods(members: Sequence[Any], hook: str) -> list[LayerHook]:
        found = [getattr(member, hook, None) for member in members]
        return [method for method in found if callable(method)]
