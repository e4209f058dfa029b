"""Builders of valid messages, for tests that then change one thing."""

from collections.abc import Iterator

from rd2h_client.v1.engine_registry_pb2 import (
    ENGINE_ROLE_DECODE,
    ENGINE_ROLE_PREFILL,
    ENGINE_STATE_SERVING,
    Engine,
    LayerLayout,
    Layout,
)
from rd2h_client.v1.rendezvous_pb2 import OUTCOME_DONE, Child, Outcome, RendezvousEvent, WithdrawRequest
from rd2h_meta.limits import RendezvousLimits
from rd2h_meta.rendezvous import RendezvousTable
from rd2h_meta.rendezvous_events import Event

PROXY, DECODE, OTHER = 1, 2, 3
"""Subscribers."""


def layout(**changes: object) -> Layout:
    """A layout of three layers."""
    fields: dict[str, object] = {
        "wire_version": 1,
        "transfer_backend": "host",
        "model": "tiny",
        "kv_dtype": "bfloat16",
        "block_size_tokens": 128,
        "layers": [
            LayerLayout(name=f"layer.{index}", main_block_bytes=[131072, 16384], indexer_block_bytes=16384)
            for index in range(3)
        ],
        "fingerprint": b"f" * 32,
    }
    return Layout(**{**fields, **changes})


def decode(engine_id: str = "d0", generation: int = 1, **changes: object) -> Engine:
    """A Decode engine."""
    fields: dict[str, object] = {
        "engine_id": engine_id,
        "generation": generation,
        "role": ENGINE_ROLE_DECODE,
        "host": "10.0.0.1",
        "base_port": 20050,
        "tp_size": 2,
        "state": ENGINE_STATE_SERVING,
        "layout": layout(),
    }
    return Engine(**{**fields, **changes})


def prefill(engine_id: str = "p0", generation: int = 1, **changes: object) -> Engine:
    """A Prefill engine."""
    return decode(engine_id, generation, **{"role": ENGINE_ROLE_PREFILL, "host": "", "base_port": 0, **changes})


def child(request_id: str = "c0", **changes: object) -> Child:
    """A child of engine d0."""
    fields: dict[str, object] = {
        "request_id": request_id,
        "token": request_id.encode()[:16].ljust(16, b"."),
        "engine_id": "d0",
        "generation": 1,
        "host": "10.0.0.1",
        "base_port": 20050,
        "tp_size": 2,
    }
    return Child(**{**fields, **changes})


def lease_ids() -> Iterator[str]:
    """Names L1, L2, ..."""
    number = 0
    while True:
        number += 1
        yield f"L{number}"


def kind(event: RendezvousEvent) -> str:
    """A short text for an event: 'advertised c0', 'ended c0 ABORTED', 'complete 1', 'closed DONE'."""
    name = event.WhichOneof("event")
    if name == "advertised":
        return f"advertised {event.advertised.request_id}"
    if name == "child_ended":
        return f"ended {event.child_ended.request_id} {_outcome(event.child_ended.outcome)}"
    if name == "complete":
        return f"complete {event.complete.live_children}"
    return f"closed {_outcome(event.closed.outcome)}"


def _outcome(number: int) -> str:
    return ("?", "DONE", "ABORTED", "FAILED", "EXPIRED")[number]


def as_message(event: Event) -> RendezvousEvent:
    """The message that carries an event of the table."""
    message = RendezvousEvent()
    event.write(message)
    return message


class RendezvousBench:
    """A rendezvous table, and what every subscriber was told."""

    def __init__(self, limits: RendezvousLimits = RendezvousLimits()) -> None:  # noqa: B008
        self.told: dict[int, list[RendezvousEvent]] = {}
        self.table = RendezvousTable(limits, lambda who, event: self.told.setdefault(who, []).append(as_message(event)))

    def story(self, who: int) -> list[str]:
        """What a subscriber was told since the last call."""
        return [kind(event) for event in self.told.pop(who, [])]

    def advertise(self, *names: str, rid: str = "r", ttl_s: float = 0.0, who: int = DECODE, now_s: float = 0.0) -> None:
        for name in names:
            self.table.advertise(rid, child(name), ttl_s, who, now_s)

    def await_(
        self,
        expected: int,
        rid: str = "r",
        ttl_s: float = 0.0,
        who: int = PROXY,
        now_s: float = 0.0,
        children_only: bool = False,
    ) -> None:
        self.table.await_children(rid, expected, ttl_s, who, now_s, children_only)

    def withdraw(
        self, name: str, outcome: Outcome = OUTCOME_DONE, reason: str = "", rid: str = "r", who: int = DECODE
    ) -> None:
        request = WithdrawRequest(
            rendezvous_id=rid, request_id=name, outcome=outcome, reason=reason, prompt_index=3, choice_index=1
        )
        self.table.withdraw(request, who, 0.0)
