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
from rd2h_client.v1.rendezvous_pb2 import Child, RendezvousEvent


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
