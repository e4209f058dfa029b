"""Errors of the meta service's cores, with the status code that each becomes on the wire."""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar

from rd2h_client.v1.rendezvous_pb2 import Outcome


class Code(IntEnum):
    """The google.rpc.Code values that the service answers with."""

    OK = 0
    INVALID_ARGUMENT = 3
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    OUT_OF_RANGE = 11
    UNAVAILABLE = 14


class MetaServiceError(Exception):
    """Base of everything that a core refuses. The message is sent to the caller."""

    code: ClassVar[Code]

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidFieldError(MetaServiceError):
    """A field of a request is malformed."""

    code = Code.INVALID_ARGUMENT

    def __init__(self, field: str, value: object, allowed: str) -> None:
        """`field` is the path in the request, `allowed` says in words what it may be."""
        super().__init__(f"{field}: got {_short(value)}, allowed: {allowed}")
        self.field = field


class UnknownError(MetaServiceError):
    """A lease or an engine is not known here."""

    code = Code.NOT_FOUND


class ConflictError(MetaServiceError):
    """The same name was used for something else."""

    code = Code.ALREADY_EXISTS


class LimitError(MetaServiceError):
    """A limit of the service is reached."""

    code = Code.RESOURCE_EXHAUSTED

    def __init__(self, message: str, retry_after_s: float) -> None:
        """`retry_after_s` is told to the caller."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class PreconditionError(MetaServiceError):
    """The state of the service forbids it."""

    code = Code.FAILED_PRECONDITION


class EndedError(PreconditionError):
    """The child or the rendezvous has ended already."""

    def __init__(self, message: str, outcome: Outcome) -> None:
        """`outcome` is how it ended."""
        super().__init__(message)
        self.outcome = outcome


class RevisionGoneError(MetaServiceError):
    """A watch cannot resume from the revision it names."""

    code = Code.OUT_OF_RANGE


class NotYetError(MetaServiceError):
    """The answer may be different in a moment; retry."""

    code = Code.UNAVAILABLE


def _short(value: object, limit: int = 80) -> str:
    """Return `value` for a message, cut so that hostile input cannot fill logs."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
