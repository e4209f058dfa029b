"""Events of a continued stream, made to look like those of the stream they continue."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from rd2h_proxy.continuation import Piece
from rd2h_proxy.logprobs import as_chat, shifted
from rd2h_proxy.openai_request import Api, JsonObject, OpenAiRequest
from rd2h_proxy.recompute_policy import RECOMPUTED
from rd2h_proxy.sse import event_data
from rd2h_proxy.token_account import Choice, hide_token_ids

_SURROGATE = re.compile("[\ud800-\udfff]")
_FRAME = ("id", "object", "created", "model")


def sse(message: JsonObject) -> bytes:
    """One event, in the compact form that vLLM writes."""
    return b"data: " + compact(message) + b"\n\n"


def compact(message: JsonObject) -> bytes:
    """The JSON text in the compact form that vLLM writes."""
    text = json.dumps(message, separators=(",", ":"), ensure_ascii=False)
    # Half of a surrogate pair can come as an escape only; it stays the client's to make sense of.
    return (text if text.isascii() else _escaped_surrogates(text)).encode()


def _escaped_surrogates(text: str) -> str:
    return _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


class StreamShape:
    """Knows the frame of the stream and how many tokens the continuations have added."""

    def __init__(self, request: OpenAiRequest) -> None:
        self._chat = request.api is Api.CHAT
        self._keeps_empty_deltas = bool(request.body.get("logprobs"))
        self._shows_ids = request.shows_token_ids
        self._frame: JsonObject = {}
        self._usage_each = False
        self._prompt_tokens: dict[int, int] = {}
        self._added = 0

    def learn(self, message: JsonObject) -> None:
        """Takes note of an event of the original stream."""
        if not self._frame:
            self._frame = {key: message[key] for key in _FRAME if key in message}
        self._usage_each = self._usage_each or message.get("usage") is not None

    def count(self, piece: Piece) -> None:
        """A continuation has added tokens."""
        self._added += len(piece.token_ids)

    def shown(self, event: bytes, message: JsonObject) -> bytes:
        """An original event as the client gets it: without what only the proxy asked for."""
        if self._shows_ids:
            return event
        if self._chat and not self._keeps_empty_deltas and all(map(_says_nothing, message["choices"])):
            # The engine sends these only because token ids were asked for.
            return b""
        return hide_token_ids(event)

    def without_the_end(self, message: JsonObject) -> bytes:
        """The event in which Decode gives a choice back: its text, but not that it ended."""
        choices = []
        for choice in message["choices"]:
            if choice.get("stop_reason") != RECOMPUTED:
                choices.append(choice)
            elif choice.get("text") or any((choice.get("delta") or {}).values()):
                choices.append({**choice, "finish_reason": None, "stop_reason": None})
        if not choices:
            return b""
        event = sse({**message, "choices": choices})
        return event if self._shows_ids else hide_token_ids(event)

    def event(self, choice: Choice, piece: Piece) -> bytes:
        """One piece of a continuation."""
        made: JsonObject = {"index": choice.index}
        if self._chat:
            made["delta"] = {"content": piece.text}
            made["logprobs"] = as_chat(piece.logprobs)
        else:
            made["text"] = piece.text
            if piece.first:
                choice.round_offset = choice.text_length
            made["logprobs"] = shifted(piece.logprobs, choice.round_offset)
        made["finish_reason"] = piece.finish_reason
        made["stop_reason"] = piece.stop_reason
        made["token_ids"] = piece.token_ids if self._shows_ids else None
        return self._framed(choice, made)

    def delta_events(
        self, choice: Choice, deltas: Sequence[JsonObject], finish_reason: str, stop_reason: object
    ) -> list[bytes]:
        """The missing parts of a message, and its end."""
        events = [
            self._framed(choice, {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None})
            for delta in deltas
        ]
        end = {"index": choice.index, "delta": {}, "logprobs": None}
        end.update(finish_reason=finish_reason, stop_reason=stop_reason)
        return [*events, self._framed(choice, end)]

    def _framed(self, choice: Choice, made: JsonObject) -> bytes:
        message = {**self._frame, "choices": [made]}
        if self._usage_each:
            message["usage"] = _usage(len(choice.prompt_ids), len(choice.generated_ids))
        return sse(message)

    def with_usage(self, event: bytes) -> bytes:
        """A held event; if it tells the usage, the continuations' tokens are added."""
        data = event_data(event)
        if data is None or not data.startswith(b"{"):
            return event
        message = json.loads(data)
        usage = message.get("usage")
        if not isinstance(usage, dict):
            return event
        message["usage"] = added_usage(usage, self._added)
        return sse(message)


def added_usage(usage: JsonObject, tokens: int) -> JsonObject:
    """Usage with the tokens of continuations; their prompts are no prompts of the client."""
    completion = (usage.get("completion_tokens") or 0) + tokens
    return {**usage, "completion_tokens": completion, "total_tokens": (usage.get("prompt_tokens") or 0) + completion}


def _usage(prompt_tokens: int, completion_tokens: int) -> JsonObject:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }


def _says_nothing(choice: JsonObject) -> bool:
    return choice.get("delta") == {} and choice.get("finish_reason") is None and bool(choice.get("token_ids"))
