"""What the two sides of a probe say to each other: small JSON objects over one ZMQ REQ/REP pair."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rd2h.errors import WireError

PROBE_VERSION: Final = 1
MAX_MESSAGE_BYTES: Final = 64 * 1024
"""Larger messages are dropped by the sockets."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Answer of Prefill to "hello": what there is to read."""

    session: str
    addr: int
    length: int
    seed: int

    def to_fields(self) -> dict[str, object]:
        """The JSON fields."""
        return {"session": self.session, "addr": self.addr, "length": self.length, "seed": self.seed}

    @classmethod
    def from_fields(cls, fields: Mapping[str, object]) -> Offer:
        """Validate an answer. Raises WireError."""
        session = fields.get("session")
        if not isinstance(session, str) or not 0 < len(session) <= 512:
            raise WireError("probe answer: field session must be a text of 1..512 characters")
        addr, length, seed = (whole_number(fields, name) for name in ("addr", "length", "seed"))
        if not 0 < addr < 1 << 64 or not 0 < length <= (1 << 64) - addr:
            raise WireError(f"probe answer: addr={addr}, length={length} is not a range of a 64-bit address space")
        return cls(session, addr, length, seed)


def whole_number(fields: Mapping[str, object], name: str) -> int:
    """Field `name` as a whole number below 2^64. Raises WireError."""
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 64:
        raise WireError(f"probe message: field {name}={str(value)[:40]} must be a whole number below 2^64")
    return value


def encode(fields: Mapping[str, object]) -> bytes:
    """One message."""
    return json.dumps(fields).encode()


def decode(frame: bytes) -> dict[str, object]:
    """Fields of a received message. Raises WireError."""
    try:
        fields = json.loads(frame.decode())
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise WireError(f"probe message is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise WireError(f"probe message must be a JSON object, got {type(fields).__name__}")
    return fields
