"""How an attempt fails: what the client would be told, who is to blame, and whether another attempt is safe."""

from __future__ import annotations

import re
from enum import Enum

from rd2h_proxy.errors import ErrorAnswer

_DELAY = re.compile(r"[0-9]{1,6}")


class Blame(Enum):
    """The party whose fault a failure is."""

    PREFILL = "prefill"
    DECODE = "decode"
    PROXY = "proxy"
    """No room, no meta service, or a fault of ours: another engine would not help."""
    META = "meta"
    """Somebody else ended the rendezvous: no engine is at fault, and a new rendezvous may do better."""
    STOPPING = "stopping"
    """The proxy ends."""
    REQUEST = "request"
    """The client's own request: 4xx are passed through and never retried."""


class AttemptError(Exception):
    """One attempt is over without an answer."""

    def __init__(self, answer: ErrorAnswer, reason: str, blame: Blame, address: str = "") -> None:
        super().__init__(reason)
        self.answer = answer
        self.blame = blame
        self.address = address
        """host:port of the engine to blame; empty when it is none."""
        self.doubtful = False
        """The request itself may be at fault; the engine is only if another one serves the request."""

    @property
    def retryable(self) -> bool:
        """Whether another engine may do better. Only asked while nothing was sent to the client."""
        return self.blame in (Blame.PREFILL, Blame.DECODE, Blame.META)


def engine_failure(blame: Blame, address: str, reason: str, status: int = 502) -> AttemptError:
    """A failure without an answer of the engine's own: refused or dropped connection, time-out, nonsense."""
    message = f"{blame.value} engine {address}: {reason}"
    return AttemptError(ErrorAnswer.make(status, message), message, blame, address)


def refused_by_engine(
    blame: Blame, address: str, status: int, body: bytes, content_type: str, retry_after: str | None
) -> AttemptError:
    """An engine's own error answer, to be passed through unchanged.

    429 and 503 say that the engine is busy, which another engine may not be; other 4xx would be the same anywhere.
    """
    if status < 400:
        return engine_failure(blame, address, f"answered {status}, which is neither success nor error here")
    after_s = int(retry_after) if retry_after is not None and _DELAY.fullmatch(retry_after) else None
    if status in (429, 503) and after_s is None:
        after_s = 1
    answer = ErrorAnswer(status, body, content_type, after_s)
    party = Blame.REQUEST if 400 <= status < 500 and status != 429 else blame
    return AttemptError(answer, f"{blame.value} engine {address} answered {status}", party, address)
