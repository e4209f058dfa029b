"""Exceptions of the clients."""

from __future__ import annotations

import re
from typing import Any, cast

import grpc

from rd2h_client.v1.rendezvous_pb2 import Outcome

RETRYABLE = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.ABORTED})
"""Transport trouble: try again until the deadline. RESOURCE_EXHAUSTED is retried after the delay that it names; every
other status is final."""


class MetaError(Exception):
    """The meta service refused an operation, or could not be reached."""

    def __init__(self, code: grpc.StatusCode, message: str, retry_after_s: float | None = None) -> None:
        """`retry_after_s` is the delay that the service asks for before another try, if any."""
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s


class MetaUnavailableError(MetaError):
    """The service could not be reached, or did not answer, before the deadline."""


class MetaRefusedError(MetaError):
    """The service answered, and the answer is final."""


class RendezvousEndedError(MetaRefusedError):
    """The child or the rendezvous had already ended."""

    def __init__(self, message: str, outcome: Outcome) -> None:
        """`outcome` is how it ended."""
        super().__init__(grpc.StatusCode.FAILED_PRECONDITION, message)
        self.outcome = outcome


class MetaExhaustedError(MetaError):
    """A limit of the service is reached and stayed so until the deadline."""


class QueueFullError(RuntimeError):
    """The client keeps as many operations as it may; the service must have been away for long."""


class ClientClosedError(RuntimeError):
    """The client was closed."""


def retry_delay_s(error: MetaError, left_s: float) -> float | None:
    """Return after how long to repeat a unary call that met a limit, or None when `left_s` does not allow that.

    Transport trouble is not repeated here: gRPC does that by the channel's retry policy.
    """
    if not isinstance(error, MetaExhaustedError) or error.retry_after_s is None or error.retry_after_s >= left_s:
        return None
    return error.retry_after_s


_NUMBER = re.compile(r"[0-9]{1,9}")
_CODES = {int(code.value[0]): code for code in grpc.StatusCode}


def make_error(
    code: int | grpc.StatusCode, message: str, retry_after_s: float | None = None, outcome: int = 0
) -> MetaError:
    """Return the exception for a status."""
    status = code if isinstance(code, grpc.StatusCode) else _CODES.get(code, grpc.StatusCode.UNKNOWN)
    if status in RETRYABLE:
        return MetaUnavailableError(status, message, retry_after_s)
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return MetaExhaustedError(status, message, retry_after_s)
    if status is grpc.StatusCode.FAILED_PRECONDITION and outcome:
        return RendezvousEndedError(message, cast(Outcome, outcome))
    return MetaRefusedError(status, message, retry_after_s)


def from_rpc_error(error: grpc.RpcError, waited_s: float | None = None) -> MetaError:
    """Return the exception for a failed call; `waited_s` is the time limit that it had, if any."""
    code = error.code() if isinstance(error, grpc.Call) or hasattr(error, "code") else grpc.StatusCode.UNKNOWN
    details = error.details() if hasattr(error, "details") else str(error)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and waited_s is not None:
        details = f"no answer within {waited_s:g} s"
    pairs: Any = error.trailing_metadata() if hasattr(error, "trailing_metadata") else None
    trailing = dict(pairs or ())
    delay_ms = _number(trailing.get("retry-after-ms"))
    return make_error(
        code,
        details or "",
        retry_after_s=delay_ms / 1000 if delay_ms else None,
        outcome=_number(trailing.get("rendezvous-outcome")) or 0,
    )


def _number(text: object) -> int | None:
    """A number out of a trailer; None for anything that the service would not send."""
    return int(text) if isinstance(text, str) and _NUMBER.fullmatch(text) else None
