"""Exception hierarchy of rd2h.

Every error raised on purpose by this package derives from `Rd2hError`. A message names what was expected, what came,
and where.
"""

from __future__ import annotations

from collections.abc import Iterable


class Rd2hError(Exception):
    """Root of all errors raised on purpose by rd2h."""


class ConfigError(Rd2hError):
    """A configuration value is missing, malformed or out of range. Raised at start-up, never per request.

    Attributes:
        key: name of the offending setting, or None when several are at fault.
    """

    def __init__(self, message: str, *, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key

    @classmethod
    def bad_value(cls, key: str, value: object, allowed: Iterable[object] | str) -> ConfigError:
        """An error that names the key, the value that came, and what is allowed (values or a phrase: "1..65535")."""
        text = allowed if isinstance(allowed, str) else "one of " + ", ".join(repr(item) for item in allowed)
        return cls(f"{key}={value!r:.200} is not allowed; expected {text}", key=key)


class TopologyError(ConfigError):
    """Tensor/data-parallel sizes, ranks or ports do not fit together."""


class LayoutError(Rd2hError):
    """The cache layouts of two peers differ. The message names the layer, the field and both values."""


class WireError(Rd2hError):
    """A received frame is not a valid message (truncated, wrong type, out of range, too large). Network input only."""


class EngineError(Rd2hError):
    """The transfer engine cannot be initialised, or cannot register memory, or refuses a session."""


class SessionError(EngineError):
    """A peer session string is malformed, or the process it names is gone, replaced, foreign or not readable."""


class TransferError(Rd2hError):
    """A read of remote memory failed.

    Attributes:
        code: the engine's non-zero result code, or None when no engine call was made.
    """

    def __init__(self, message: str, *, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class RequestError(Rd2hError):
    """One request cannot be served (refused, expired, aborted). Never ends an engine."""


class StateError(Rd2hError):
    """An operation was called in a state that does not allow it (a defect in the caller)."""


class QueueFullError(Rd2hError):
    """A bounded queue or table is full; the message says which one and its bound."""
