"""A small client for OpenAI completions on the loopback address."""

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
    """An engine or the proxy answered with an error, or with something that is not a completion."""


@dataclass(frozen=True)
class StreamPiece:
    """One event of a streamed completion."""

    text: str
    token_ids: Tokens
    finish_reason: str | None


def _open(url: str, body: Mapping[str, object], timeout_s: float) -> Any:
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    # No proxy of the environment: these are loopback addresses.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        return opener.open(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")[:500]
        raise CompletionError(f"{url} answered {error.code}: {text}") from None
    except OSError as error:
        raise CompletionError(f"{url} does not answer: {error}") from None


def complete(url: str, body: Mapping[str, object], timeout_s: float = TIMEOUT_S) -> tuple[Tokens, ...]:
    """Returns the token ids of every choice, in the order of their indices.

    Raises CompletionError for an HTTP error or a malformed answer.
    """
    with _open(url, body, timeout_s) as answer:
        content = json.load(answer)
    try:
        choices = sorted(content["choices"], key=lambda choice: choice["index"])
        return tuple(tuple(choice["token_ids"]) for choice in choices)
    except (KeyError, TypeError) as error:
        raise CompletionError(f"{url} answered without {error}: {json.dumps(content)[:500]}") from None


def stream(url: str, body: Mapping[str, object], timeout_s: float = TIMEOUT_S) -> Iterator[StreamPiece]:
    """Yields the events of a streamed completion of one choice as they come.

    Raises CompletionError for an HTTP error, an error event, and a stream that ends without its end mark.
    """
    with _open(url, {**body, "stream": True}, timeout_s) as answer:
        for raw in answer:
            line = raw.decode().strip()
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
