"""How a core's refusal becomes a gRPC status."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NoReturn, Protocol

import grpc
from rd2h_client.v1.rendezvous_pb2 import OperationResult

from rd2h_meta.errors import Code, EndedError, LimitError, MetaServiceError

GRPC_CODES: Mapping[Code, grpc.StatusCode] = MappingProxyType({code: grpc.StatusCode[code.name] for code in Code})
"""Code of a core to status code of gRPC."""

RETRY_AFTER_KEY = "retry-after-ms"
"""Trailing metadata with the delay before a retry; `grpc-retry-pushback-ms` says the same to gRPC itself."""

OUTCOME_KEY = "rendezvous-outcome"
"""Trailing metadata with the Outcome (a number) that the named child or rendezvous had already."""


class AbortContext(Protocol):
    """The part of a grpc.aio servicer context that ends a call."""

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: tuple[tuple[str, str], ...] = ()
    ) -> NoReturn:
        """End the call with a status."""


async def abort(context: AbortContext, error: MetaServiceError) -> NoReturn:
    """End a unary call, or a stream, with what a core refused."""
    trailing: tuple[tuple[str, str], ...] = ()
    if isinstance(error, LimitError):
        delay_ms = str(_milliseconds(error.retry_after_s))
        trailing = ((RETRY_AFTER_KEY, delay_ms), ("grpc-retry-pushback-ms", delay_ms))
    elif isinstance(error, EndedError):
        trailing = ((OUTCOME_KEY, str(int(error.outcome))),)
    await context.abort(GRPC_CODES[error.code], error.message, trailing)


def refusal_of(op_id: int, error: MetaServiceError) -> OperationResult:
    """Return the result of a refused operation of an Exchange stream."""
    result = OperationResult(op_id=op_id, code=error.code, message=error.message)
    if isinstance(error, LimitError):
        result.retry_after_ms = _milliseconds(error.retry_after_s)
    elif isinstance(error, EndedError):
        result.outcome = error.outcome
    return result


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
