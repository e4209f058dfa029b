"""Checks of what comes from the network, before it reaches a core. Messages name field, value and what is allowed."""

from __future__ import annotations

from rd2h_client.addresses import MAX_PORT, AddressError, check_advertised_host, split_host_port
from rd2h_client.v1.engine_registry_pb2 import (
    ENGINE_ROLE_DECODE,
    ENGINE_ROLE_PREFILL,
    ENGINE_STATE_DRAINING,
    ENGINE_STATE_SERVING,
    ENGINE_STATE_STARTING,
    ENGINE_STATE_UNSPECIFIED,
    DataPathHealth,
    Engine,
    Layout,
)
from rd2h_client.v1.rendezvous_pb2 import (
    OUTCOME_ABORTED,
    OUTCOME_DONE,
    OUTCOME_FAILED,
    OUTCOME_UNSPECIFIED,
    Child,
    Outcome,
)

from rd2h_meta.errors import InvalidFieldError

MAX_ENGINE_ID_BYTES = 256
MAX_RENDEZVOUS_ID_BYTES = 128
MAX_REQUEST_ID_BYTES = 512
MAX_REASON_BYTES = 1024
MAX_NAME_BYTES = 512
MAX_FINGERPRINT_BYTES = 64
MAX_TENSORS_PER_LAYER = 16
MAX_PARALLEL_SIZE = 4_096
MAX_CHILD_INDEX = 1_000_000
TOKEN_BYTES = 16
MAX_ENGINE_BYTES = 1024 * 1024
"""All known fields at their longest make 0.7 MiB; fields of another version are kept and sent on, within this bound."""
MAX_CHILD_BYTES = 1_536
"""All known fields at their longest make 1.2 KiB; see MAX_ENGINE_BYTES."""

_STATES = (ENGINE_STATE_UNSPECIFIED, ENGINE_STATE_STARTING, ENGINE_STATE_SERVING, ENGINE_STATE_DRAINING)


def check_text(field: str, value: str, max_bytes: int, required: bool = True) -> None:
    """Check a name or id: length in UTF-8 bytes, and no control characters (they would forge log lines)."""
    if not value:
        if required:
            raise InvalidFieldError(field, value, f"1 to {max_bytes} bytes")
        return
    if len(value) * 4 > max_bytes and len(value.encode()) > max_bytes:
        raise InvalidFieldError(field, value, f"at most {max_bytes} bytes")
    if not value.isprintable():
        raise InvalidFieldError(field, value, "printable characters only")


def clean_reason(reason: str) -> str:
    """Return a reason fit for logs and events: control characters replaced, cut to MAX_REASON_BYTES."""
    if reason and not reason.isprintable():
        reason = "".join(character if character.isprintable() else " " for character in reason)
    if len(reason) * 4 > MAX_REASON_BYTES:
        encoded = reason.encode()
        if len(encoded) > MAX_REASON_BYTES:
            reason = encoded[: MAX_REASON_BYTES - 3].decode(errors="ignore") + "..."
    return reason


def check_host_and_ports(prefix: str, host: str, base_port: int, tp_size: int) -> None:
    """Check a data-path address: no wildcard, and every rank's port within 1..65535."""
    try:
        check_advertised_host(host)
    except AddressError as error:
        raise InvalidFieldError(f"{prefix}.host", host, str(error)) from error
    last_port = base_port + tp_size - 1
    if base_port < 1 or last_port > MAX_PORT:
        allowed = f"1..{MAX_PORT} for all {tp_size} ranks (the last one gets {last_port})"
        raise InvalidFieldError(f"{prefix}.base_port", base_port, allowed)


def check_engine(engine: Engine, max_layers: int) -> None:
    """Check an engine that registers; the reason of its health is cleaned in place.

    Raises:
        InvalidFieldError: naming the field.
    """
    check_engine_size(engine)
    check_text("engine.engine_id", engine.engine_id, MAX_ENGINE_ID_BYTES)
    if engine.generation == 0:
        raise InvalidFieldError("engine.generation", 0, "a random value, not 0")
    if engine.role not in (ENGINE_ROLE_PREFILL, ENGINE_ROLE_DECODE):
        raise InvalidFieldError("engine.role", engine.role, "ENGINE_ROLE_PREFILL (1) or ENGINE_ROLE_DECODE (2)")
    if engine.state not in _STATES:
        raise InvalidFieldError("engine.state", engine.state, "an EngineState, 0 to 3")
    if not 1 <= engine.tp_size <= MAX_PARALLEL_SIZE:
        raise InvalidFieldError("engine.tp_size", engine.tp_size, f"1..{MAX_PARALLEL_SIZE}")
    dp_size = engine.dp_size or 1
    if dp_size > MAX_PARALLEL_SIZE:
        raise InvalidFieldError("engine.dp_size", dp_size, f"1..{MAX_PARALLEL_SIZE}")
    if engine.dp_rank >= dp_size:
        raise InvalidFieldError("engine.dp_rank", engine.dp_rank, f"0..{dp_size - 1} (dp_size is {dp_size})")
    if engine.role == ENGINE_ROLE_DECODE:
        check_host_and_ports("engine", engine.host, engine.base_port, engine.tp_size)
    elif engine.host or engine.base_port:
        check_host_and_ports("engine", engine.host, engine.base_port or 1, 1)
    if engine.http_address:
        check_text("engine.http_address", engine.http_address, MAX_NAME_BYTES)
        try:
            host, _ = split_host_port(engine.http_address)
            check_advertised_host(host)
        except AddressError as error:
            raise InvalidFieldError("engine.http_address", engine.http_address, str(error)) from error
    if engine.HasField("layout"):
        _check_layout(engine.layout, max_layers)
    if engine.HasField("health"):
        clean_health(engine.health)


def check_engine_size(engine: Engine) -> None:
    """Check that a message about this engine can be sent to watchers."""
    if engine.ByteSize() > MAX_ENGINE_BYTES:
        raise InvalidFieldError("engine", f"{engine.ByteSize()} bytes", f"at most {MAX_ENGINE_BYTES} bytes")


def clean_health(health: DataPathHealth) -> None:
    """Make the reason of a reported data-path health fit for logs and events, in place."""
    if health.reason:
        health.reason = clean_reason(health.reason)


def _check_layout(layout: Layout, max_layers: int) -> None:
    for name in ("transfer_backend", "transfer_protocol", "model", "kv_dtype"):
        check_text(f"engine.layout.{name}", getattr(layout, name), MAX_NAME_BYTES, required=False)
    if len(layout.layers) > max_layers:
        raise InvalidFieldError("engine.layout.layers", len(layout.layers), f"at most {max_layers} layers")
    if len(layout.fingerprint) > MAX_FINGERPRINT_BYTES:
        raise InvalidFieldError(
            "engine.layout.fingerprint", f"{len(layout.fingerprint)} bytes", f"at most {MAX_FINGERPRINT_BYTES} bytes"
        )
    for index, layer in enumerate(layout.layers):
        check_text(f"engine.layout.layers[{index}].name", layer.name, MAX_NAME_BYTES)
        if len(layer.main_block_bytes) > MAX_TENSORS_PER_LAYER:
            raise InvalidFieldError(
                f"engine.layout.layers[{index}].main_block_bytes",
                f"{len(layer.main_block_bytes)} tensors",
                f"at most {MAX_TENSORS_PER_LAYER} tensors",
            )


def check_child(child: Child) -> None:
    """Check an advertised child.

    Raises:
        InvalidFieldError: naming the field.
    """
    if child.ByteSize() > MAX_CHILD_BYTES:
        raise InvalidFieldError("child", f"{child.ByteSize()} bytes", f"at most {MAX_CHILD_BYTES} bytes")
    check_text("child.request_id", child.request_id, MAX_REQUEST_ID_BYTES)
    if len(child.token) != TOKEN_BYTES:
        raise InvalidFieldError("child.token", f"{len(child.token)} bytes", f"{TOKEN_BYTES} random bytes")
    check_text("child.engine_id", child.engine_id, MAX_ENGINE_ID_BYTES)
    tp_size = child.tp_size
    if not 1 <= tp_size <= MAX_PARALLEL_SIZE:
        raise InvalidFieldError("child.tp_size", tp_size, f"1..{MAX_PARALLEL_SIZE}")
    for name in ("pcp_size", "dcp_size"):
        size = getattr(child, name)
        if size > MAX_PARALLEL_SIZE:
            raise InvalidFieldError(f"child.{name}", size, f"1..{MAX_PARALLEL_SIZE}, or 0 for 1")
    check_host_and_ports("child", child.host, child.base_port, tp_size)
    if len(child.layout_fingerprint) > MAX_FINGERPRINT_BYTES:
        raise InvalidFieldError(
            "child.layout_fingerprint", f"{len(child.layout_fingerprint)} bytes", f"at most {MAX_FINGERPRINT_BYTES}"
        )
    check_indices("child", child.prompt_index, child.choice_index)


def check_indices(prefix: str, prompt_index: int, choice_index: int) -> None:
    """Check the place of a child in its request."""
    if prompt_index > MAX_CHILD_INDEX:
        raise InvalidFieldError(f"{prefix}.prompt_index", prompt_index, f"0..{MAX_CHILD_INDEX}")
    if choice_index > MAX_CHILD_INDEX:
        raise InvalidFieldError(f"{prefix}.choice_index", choice_index, f"0..{MAX_CHILD_INDEX}")


def check_rendezvous_id(rendezvous_id: str) -> None:
    """Check the name of a rendezvous."""
    check_text("rendezvous_id", rendezvous_id, MAX_RENDEZVOUS_ID_BYTES)


def check_withdraw_outcome(outcome: Outcome) -> None:
    """Check how a child ended, as told by Decode."""
    if outcome not in (OUTCOME_DONE, OUTCOME_ABORTED, OUTCOME_FAILED):
        raise InvalidFieldError("outcome", outcome, "OUTCOME_DONE (1), OUTCOME_ABORTED (2) or OUTCOME_FAILED (3)")


def cancel_outcome(outcome: Outcome) -> Outcome:
    """Return the outcome of a cancelled rendezvous; absent means aborted."""
    if outcome not in (OUTCOME_UNSPECIFIED, OUTCOME_DONE, OUTCOME_ABORTED):
        raise InvalidFieldError("outcome", outcome, "OUTCOME_DONE (1), OUTCOME_ABORTED (2) or absent")
    return OUTCOME_DONE if outcome == OUTCOME_DONE else OUTCOME_ABORTED
