"""Order of the layer hooks in a composite, and the hand-over of the wait."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import pytest

from rd2h.composition.phases import LayerPhases, is_provider
from rd2h.composition.returned import ReturnedParameters


@dataclass
class Provider:
    name: str
    log: list[tuple[str, str, Any]]
    supports_layerwise_buffer_reuse: bool = True

    def wait_for_layer_reuse(self, layer_idx: int) -> None:
        self.log.append((self.name, "reuse", layer_idx))

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.log.append((self.name, "load", layer_name))

    def save_kv_layer(self, layer_name: str) -> None:
        self.log.append((self.name, "save", layer_name))

    def on_kv_cache_written(self, layer_name: str) -> None:
        self.log.append((self.name, "written", layer_name))


@dataclass
class Store:
    """A store without ``on_kv_cache_written``."""

    name: str
    log: list[tuple[str, str, Any]]

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.log.append((self.name, "load", layer_name))

    def save_kv_layer(self, layer_name: str) -> None:
        self.log.append((self.name, "save", layer_name))


@dataclass
class Sink(Store):
    """A store that may take over the wait."""

    answer: object = None
    waiters: list[Callable[[int], None]] = field(default_factory=list)

    def set_external_slot_release_waiter(self, waiter: Callable[[int], None]) -> object:
        if self.answer is not False:
            self.waiters.append(waiter)
        return self.answer

    def wait_for_layer_load(self, layer_name: str) -> None:
        super().wait_for_layer_load(layer_name)
        for waiter in self.waiters:
            waiter(7)


def run(phases: LayerPhases) -> None:
    for hook in phases.loaders("wait_for_layer_load"):
        hook("l")
    for hook in phases.writers("on_kv_cache_written"):
        hook("l")
    for hook in phases.writers("save_kv_layer"):
        hook("l")


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_providers_run_first_in_every_configuration_order(order: tuple[int, ...]) -> None:
    log: list[tuple[str, str, Any]] = []
    members = [Provider("p", log), Store("a", log), Store("b", log)]
    phases = LayerPhases([members[i] for i in order])
    run(phases)
    rest = [members[i].name for i in order if i != 0]
    assert log == [
        *[(name, "load", "l") for name in ("p", *rest)],
        ("p", "written", "l"),
        *[(name, "save", "l") for name in ("p", *rest)],
    ]
    assert phases.sinks == ()


@pytest.mark.parametrize("order", list(permutations(range(4))))
@pytest.mark.parametrize("answer", [None, True, 0, "yes"])
def test_sink_owns_the_wait_and_calls_every_provider(order: tuple[int, ...], answer: object) -> None:
    """Anything but False takes over; 0 and None are not False."""
    log: list[tuple[str, str, Any]] = []
    members = [Provider("p", log), Sink("s", log, answer), Store("a", log), Provider("q", log)]
    configured = [members[i] for i in order]
    phases = LayerPhases(configured)
    for hook in phases.loaders("wait_for_layer_load"):
        hook("l")
    providers = [m.name for m in configured if m.name in "pq"]
    siblings = [m.name for m in configured if m.name in "sa"]
    expected: list[tuple[str, str, Any]] = []
    for name in siblings:
        expected.append((name, "load", "l"))
        if name == "s":
            expected += [(provider, "reuse", 7) for provider in providers]
    assert log == expected
    log.clear()
    for hook in phases.writers("save_kv_layer"):
        hook("l")
    assert [name for name, _, _ in log] == [*providers, *siblings]


def test_sink_that_declines_leaves_the_wait_to_the_providers() -> None:
    log: list[tuple[str, str, Any]] = []
    phases = LayerPhases([Sink("s", log, False), Provider("p", log)])
    for hook in phases.loaders("wait_for_layer_load"):
        hook("l")
    assert log == [("p", "load", "l"), ("s", "load", "l")]


def test_no_provider_no_hand_over() -> None:
    log: list[tuple[str, str, Any]] = []
    sink = Sink("s", log)
    phases = LayerPhases([sink, Store("a", log)])
    assert (phases.providers, phases.sinks, sink.waiters) == ((), (), [])


def test_a_failing_wait_is_not_swallowed() -> None:
    log: list[tuple[str, str, Any]] = []

    class Broken(Provider):
        def wait_for_layer_reuse(self, layer_idx: int) -> None:
            raise RuntimeError("gate lost")

    phases = LayerPhases([Broken("b", log), Provider("p", log)])
    with pytest.raises(RuntimeError, match="gate lost"):
        phases.wait_for_slot(0)


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({"supports_layerwise_buffer_reuse": True, "wait_for_layer_reuse": lambda i: None}, True),
        ({"supports_layerwise_buffer_reuse": False, "wait_for_layer_reuse": lambda i: None}, False),
        ({"supports_layerwise_buffer_reuse": True, "wait_for_layer_reuse": None}, False),
        ({"supports_layerwise_buffer_reuse": True}, False),
        ({"supports_layerwise_buffer_reuse": lambda: False, "wait_for_layer_reuse": lambda i: None}, False),
        ({}, False),
    ],
)
def test_what_makes_a_provider(attributes: dict[str, Any], expected: bool) -> None:
    assert (
        is_provider(type("Member", (), {k: staticmethod(v) if callable(v) else v for k, v in attributes.items()})())
        is expected
    )


def test_one_member_returns_parameters() -> None:
    returned = ReturnedParameters()
    assert returned.of("r", [("A", None), ("B", None)]) is None
    assert returned.of("r", [("A", None), ("B", {"x": 1})]) == {"x": 1}
    assert returned.refused == 0


def test_second_members_parameters_are_refused_aloud(caplog: pytest.LogCaptureFixture) -> None:
    """Even with disjoint keys: a mixture of two members' parameters means nothing to either peer."""
    returned = ReturnedParameters()
    assert returned.of("req-1", [("A", {"x": 1}), ("B", None), ("C", {"y": 2})]) == {"x": 1}
    assert returned.of("req-2", [("A", {"x": 3}), ("C", {"x": 4})]) == {"x": 3}
    assert returned.refused == 2
    lines = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(lines) == 1
    assert "req-1" in lines[0]
    assert "A and C" in lines[0]


def test_empty_parameters_count_as_returned() -> None:
    returned = ReturnedParameters()
    assert returned.of("r", [("A", {}), ("B", {"y": 2})]) == {}
    assert returned.refused == 1
