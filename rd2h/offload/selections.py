"""Selections of a step, layer by layer: chosen by a layer's own indexer, or taken over from an earlier layer.

A layer that takes over another's selections holds the same tokens in the same slots of its own hot buffer, as long as
it has taken over every one of them. Both share the residency table of the layer that chose. Pure: what is to be copied
is handed out, and the caller tells by leaving the ``with`` block how that went.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rd2h.errors import StateError
from rd2h.offload.compiled import Kernel
from rd2h.offload.residency import Geometry, Int32s, Int64s, Plan, Question, ResidencyTable, Workspace

NOTHING = 0
"""Number of no selection: the hot buffer holds nothing that counts."""


@dataclass(slots=True)
class _Layer:
    """What a layer's hot buffer holds."""

    table: ResidencyTable | None = None
    """For selections of its own."""
    question: Question | None = None
    plan: Plan | None = None
    """The latest selection of its own, once its rows have been copied."""
    holds: int = NOTHING
    """Number of the selection, whoever chose it, that the hot buffer was brought to last."""
    before: int = NOTHING
    """What it held when ``plan`` was made: the plan's misses are what differs."""


@dataclass(frozen=True, slots=True)
class Takeover:
    """Rows to copy for a selection of another layer."""

    slots: Int32s
    targets: Int64s
    sources: Int64s
    resync: bool
    """The layer had missed a selection, so everything is copied and the choosing layer starts over."""


class Selections:
    """All layers of a worker. One thread."""

    def __init__(self, names: list[str], geometry: Geometry, kernel: Kernel | None) -> None:
        self._geometry, self._kernel = geometry, kernel
        self._workspace = Workspace(geometry)
        self._layers = {name: _Layer() for name in names}
        # One count for all layers: a number never means the selections of two of them.
        self._numbers = itertools.count(NOTHING + 1)

    @contextmanager
    def choose(self, name: str, question: Question) -> Iterator[Plan]:
        """A selection of the layer's own. An exception inside means that its rows were not copied."""
        layer = self._layers[name]
        if layer.table is None:
            layer.table = ResidencyTable(self._geometry, self._workspace, self._kernel)
        before, layer.holds = layer.holds, NOTHING
        layer.question, layer.plan = question, None
        with _clear_on_error(layer.table):
            plan = layer.table.plan(question)
            yield plan
        layer.plan, layer.before, layer.holds = plan, before, next(self._numbers)

    @contextmanager
    def take_over(self, name: str, source_name: str) -> Iterator[Takeover]:
        """The latest selection of ``source_name``. Raises StateError when there is none."""
        layer, source = self._layers[name], self._layers[source_name]
        if source.plan is None or source.table is None or source.question is None or layer is source:
            raise StateError(f"{name!r} cannot reuse the selection of {source_name!r}: there is none")
        held, layer.holds = layer.holds, NOTHING
        if layer.table is not None:
            layer.table.clear()
        plan = source.plan
        if held == source.holds:
            takeover = Takeover(plan.slots, plan.targets[:0], plan.sources[:0], False)
        elif held == source.before:
            takeover = Takeover(plan.slots, plan.targets, plan.sources, False)
        else:
            takeover = Takeover(plan.slots, *source.table.whole_selection(source.question, plan), True)
            source.table.clear()
        layer.plan = None
        with _clear_on_error(source.table):
            yield takeover
        layer.holds = source.holds


@contextmanager
def _clear_on_error(table: ResidencyTable) -> Iterator[None]:
    copied = False
    try:
        yield
        copied = True
    finally:
        if not copied:
            table.clear()
