"""Typed access to the positions of a decoded tuple: what does not fit becomes WireError."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rd2h.errors import WireError
from rd2h.wire.messages import MAX_NAME_CHARS, MAX_REQUESTS_PER_MESSAGE, TOKEN_BYTES


@dataclass(slots=True)
class Fields:
    """Typed access to the positions of one decoded tuple."""

    tag: bytes
    values: Sequence[Any]

    def at(self, index: int, kind: type, what: str) -> Any:
        """A value of this very type (a boolean is no number)."""
        if index >= len(self.values):
            raise WireError(f"{self.tag!r}: {what} at position {index} is missing")
        value = self.values[index]
        if isinstance(value, bool) or not isinstance(value, kind):
            raise WireError(f"{self.tag!r}: {what} must be {kind.__name__}, got {type(value).__name__}")
        return value

    def unsigned(self, index: int, what: str, maximum: int = (1 << 64) - 1) -> int:
        """A number from 0 to ``maximum``."""
        value: int = self.at(index, int, what)
        if not 0 <= value <= maximum:
            raise WireError(f"{self.tag!r}: {what} must be 0..{maximum}, got {value}")
        return value

    def text(self, index: int, what: str, maximum: int = MAX_NAME_CHARS) -> str:
        """Text of at most ``maximum`` characters."""
        value: str = self.at(index, str, what)
        if len(value) > maximum:
            raise WireError(f"{self.tag!r}: {what} is longer than {maximum} characters")
        return value

    def token(self, index: int) -> bytes:
        """A child token."""
        return check_token(self.at(index, bytes, "token"))

    def list(self, index: int, what: str) -> list[Any]:
        """A list of at most ``MAX_REQUESTS_PER_MESSAGE`` entries."""
        value: list[Any] = self.at(index, list, what)
        if len(value) > MAX_REQUESTS_PER_MESSAGE:
            raise WireError(f"{self.tag!r}: {what} has more than {MAX_REQUESTS_PER_MESSAGE} entries")
        return value


def check_token(value: object) -> bytes:
    """A child token: 16 bytes."""
    if not isinstance(value, bytes) or len(value) != TOKEN_BYTES:
        raise WireError(f"token must be {TOKEN_BYTES} bytes")
    return value
