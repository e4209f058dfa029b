"""A small client for OpenAI completions on the loopback address."""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rd2h.errors import Rd2hError

TIMEOUT_S = 120.0

Tokens = tuple[int, ...]


class CompletionError(Rd2hError):
    """An engine or the proxy answered with an error, or with something that is not a completion.

    Attributes:
        status: the HTTP status of a refusal, or None when there was no answer or it broke off.
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class StreamPiece:
    """One event of a streamed completion."""

    text: str
    token_ids: Tokens
    finish_reason: str | None


def _open(url: str, body: Mapping[str, object], timeout_s: float, path: str = "/v1/completions") -> Any:
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    # No proxy of the environment: these are loopback addresses.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        return opener.open(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")[:500]
        raise CompletionError(f"{url} answered {error.code}: {text}", status=error.code) from None
    except (OSError, http.client.HTTPException) as error:
        raise CompletionError(f"{url} does not answer: {error!r}") from None


def post(url: str, path: str, body: Mapping[str, object], timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Posts JSON and returns the JSON object of the answer. Raises CompletionError."""
    with _open(url, body, timeout_s, path) as answer:
        try:
            content = json.load(answer)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise CompletionError(f"{url}{path} broke off its answer: {error!r}") from None
    if not isinstance(content, dict):
        raise CompletionError(f"{url}{path} answered with {type(content).__name__}, expected a JSON object")
    return content


def complete(url: str, body: Mapping[str, object], timeout_s: float = TIMEOUT_S) -> tuple[Tokens, ...]:
    """Returns the token ids of every choice, in the order of their indices.

    Raises CompletionError for an HTTP error or a malformed answer.
    """
    content = post(url, "/v1/completions", body, timeout_s)
    try:
        choices = sorted(content["choices"], key=lambda choice: choice["index"])
        return tuple(tuple(choice["token_ids"]) for choice in choices)
    except (KeyError, TypeError) as error:
        raise CompletionError(f"{url} answered without {error}: {json.dumps(content)[:500]}") from None


def _lines(answer: Any, url: str) -> Iterator[str]:
    try:
        for raw in answer:
            yield raw.decode().strip()
    except (OSError, http.client.HTTPException) as error:
        raise CompletionError(f"{url} broke off the stream: {error!r}") from None


def stream(url: str, body: Mapping[str, object], timeout_s: float = TIMEOUT_S) -> Iterator[StreamPiece]:
    """Yields the events of a streamed completion of one choice as they come.

    Raises CompletionError for an HTTP error, an error event, and a stream that ends without its end mark.
    """
    with _open(url, {**body, "stream": True}, timeout_s) as answer:
        for line in _lines(answer, url):
            if not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise CompletionError(f"{url} ended the stream: {event['error']}")
            for choice in event["choices"]:
                yield StreamPiece(choice["text"], tuple(choice.get("token_ids") or ()), choice["finish_reason"])
    raise CompletionError(f"{url} closed the stream before its end mark")
