"""Errors of the proxy and how each looks to an HTTP client."""

from __future__ import annotations

import json
from dataclasses import dataclass

JSON_TYPE = "application/json"

_KINDS = {
    400: "BadRequestError",
    404: "NotFoundError",
    405: "MethodNotAllowed",
    408: "RequestTimeout",
    413: "RequestTooLarge",
    429: "TooManyRequests",
    502: "BadGateway",
    503: "ServiceUnavailable",
    504: "GatewayTimeout",
}


class ConfigError(ValueError):
    """The command line or the environment is not usable; the message names the flag, the value and what is allowed."""


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """A complete HTTP error as the client will see it."""

    status: int
    body: bytes
    content_type: str = JSON_TYPE
    retry_after_s: int | None = None

    @classmethod
    def make(cls, status: int, message: str, retry_after_s: int | None = None) -> ErrorAnswer:
        """Builds the error object that OpenAI clients understand."""
        kind = _KINDS.get(status, "InternalServerError")
        error = {"message": message, "type": kind, "param": None, "code": status}
        return cls(status, json.dumps({"error": error}).encode(), JSON_TYPE, retry_after_s)

    def as_sse_event(self) -> bytes:
        """The same error as one server-sent event, for a stream that has begun.

        A body without an error object (a reverse proxy's HTML page, or `{"detail": ...}`) is wrapped: clients take an
        event for an error by that key, and anything else for a chunk.
        """
        try:
            payload = json.loads(self.body)
        except (ValueError, RecursionError):
            payload = None
        if not isinstance(payload, dict) or not payload.get("error"):
            text = self.body[:2000].decode("utf-8", "replace")
            payload = {"error": {"message": text, "type": "InternalServerError", "param": None, "code": self.status}}
        return b"data: " + json.dumps(payload).encode() + b"\n\n"


class ProxyError(Exception):
    """A request that the proxy itself ends with an HTTP error."""

    def __init__(self, status: int, message: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.answer = ErrorAnswer.make(status, message, retry_after_s)


class RequestRefusedError(ProxyError):
    """The request is malformed or asks for something that the proxy does not let through (400)."""

    def __init__(self, message: str) -> None:
        super().__init__(400, message)


class OverloadedError(ProxyError):
    """Every queue is full (429); the client should come back after the given time."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(429, message, retry_after_s)


class UnavailableError(ProxyError):
    """No engine or no meta service can take the request now (503)."""

    def __init__(self, message: str, retry_after_s: int = 2) -> None:
        super().__init__(503, message, retry_after_s)
