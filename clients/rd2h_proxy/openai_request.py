"""What the proxy must know of an OpenAI request: how many children it expands into and how long it is.

Everything else is left to the engines: a field that the proxy does not need is neither checked nor changed.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn

from rd2h_proxy.errors import RequestRefusedError

JsonObject = dict[str, Any]

# Output lengths are unknown before the end. Few requests reach a large max_tokens, so the estimate is capped.
_OUTPUT_ESTIMATE_CAP_TOKENS = 512
_DEFAULT_OUTPUT_TOKENS = 256
_MEDIA_PART_TOKENS = 1000

_QUOTED = reprlib.Repr()
_QUOTED.maxstring = _QUOTED.maxlong = _QUOTED.maxother = 60
_QUOTED.maxlevel, _QUOTED.maxlist, _QUOTED.maxdict = 1, 4, 2
# Keys of the parts of a chat message, as vLLM knows them.
_TEXT_KEYS = ("text", "thinking", "refusal")
_MEDIA_KEYS = frozenset(
    {"image_url", "image_embeds", "image_pil", "audio_url", "audio_embeds", "input_audio", "video_url", "video_embeds"}
)


class Api(Enum):
    """The two generating endpoints; the value is the path, the same on the proxy and on the engines."""

    COMPLETION = "/v1/completions"
    CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class OpenAiRequest:
    """A request whose shape is understood."""

    api: Api
    body: JsonObject
    """The client's JSON object, never changed."""
    prompts: int
    """Number of prompts; 1 for chat."""
    n: int
    """Choices for every prompt."""
    stream: bool
    prompt_sizes: tuple[int, ...]
    """Per prompt: exact tokens (see `sizes_are_tokens`) or bytes of text."""
    sizes_are_tokens: bool
    media_tokens: int
    """Rough tokens of pictures and sound, on top of `prompt_sizes`."""
    whole_reason: str | None
    """Why the request cannot be split between engines and must run whole on a Prefill engine; None if it can."""
    shows_token_ids: bool = False
    """Whether the client itself asked for token ids."""
    tracks_tokens: bool = False
    """Whether the proxy keeps the answer's token ids; see recompute_policy."""

    @property
    def expected_children(self) -> int:
        """Decode requests that this request expands into."""
        return self.prompts * self.n

    @property
    def may_call_tools(self) -> bool:
        """Whether the answer may hold tool calls, which a parser of the engine takes apart."""
        return bool(self.body.get("tools")) and self.body.get("tool_choice") != "none"

    def prompt_tokens(self, bytes_per_token: float) -> int:
        """Estimated tokens of all prompts together, at least 1 each."""
        scale = 1.0 if self.sizes_are_tokens else bytes_per_token
        return sum(max(1, round(size / scale)) for size in self.prompt_sizes) + self.media_tokens

    def output_tokens(self) -> int:
        """Estimated tokens that Decode generates over all children."""
        limit = self.body.get("max_completion_tokens") or self.body.get("max_tokens")
        each = limit if isinstance(limit, int) and limit > 0 else _DEFAULT_OUTPUT_TOKENS
        return min(each, _OUTPUT_ESTIMATE_CAP_TOKENS) * self.expected_children


def parse_request(api: Api, raw: bytes | bytearray, max_children: int) -> OpenAiRequest:
    """Reads a client's body.

    Raises:
        RequestRefusedError: not a JSON object, no usable prompt, too many children, or parameters that only the proxy
            may set.
    """
    body = _load_object(raw)
    if body.get("kv_transfer_params") is not None:
        raise RequestRefusedError("kv_transfer_params: set by a client; only the proxy may set it, remove the field")
    n = _positive_int(body, "n", max_children)
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise RequestRefusedError(f"stream: {_quoted(stream)} given, allowed are true and false")
    if api is Api.CHAT:
        sizes, exact, media = *_chat_sizes(body), _count_media(body.get("messages"))
    else:
        sizes, exact = _completion_sizes(body)
        media = 0
    children = len(sizes) * n
    if children > max_children:
        raise RequestRefusedError(
            f"prompts x n: {len(sizes)} x {n} = {children} given, at most {max_children} are allowed"
        )
    return OpenAiRequest(
        api=api,
        body=body,
        prompts=len(sizes),
        n=n,
        stream=bool(stream),
        prompt_sizes=tuple(sizes),
        sizes_are_tokens=exact,
        media_tokens=media * _MEDIA_PART_TOKENS,
        whole_reason=_whole_reason(api, body),
        shows_token_ids=bool(body.get("return_token_ids")),
    )


def _load_object(raw: bytes | bytearray) -> JsonObject:
    try:
        body = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RequestRefusedError(f"body: not valid JSON ({error}); a JSON object is expected") from error
    if not isinstance(body, dict):
        raise RequestRefusedError(f"body: {type(body).__name__} given, a JSON object is expected")
    return body


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _positive_int(body: JsonObject, key: str, highest: int) -> int:
    value = body.get(key)
    if value is None:
        return 1
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= highest:
        raise RequestRefusedError(f"{key}: {_quoted(value)} given, a whole number from 1 to {highest} is expected")
    return value


def _quoted(value: object) -> str:
    """A client's value for a message, cut: the message also goes to the log and stays on the status page."""
    return _QUOTED.repr(value)


def _completion_sizes(body: JsonObject) -> tuple[list[int], bool]:
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return [_text_bytes(prompt)], False
    if prompt is None and body.get("prompt_embeds") is not None:
        return [1], True
    if not isinstance(prompt, list) or not prompt:
        raise RequestRefusedError(
            f"prompt: {_quoted(prompt)} given, a text, a list of token ids, or a non-empty list of either is expected"
        )
    if all(isinstance(item, int) for item in prompt):
        return [len(prompt)], True
    if all(isinstance(item, str) for item in prompt):
        return [_text_bytes(item) for item in prompt], False
    if all(isinstance(item, list) for item in prompt):
        return [len(item) for item in prompt], True
    raise RequestRefusedError(
        f"prompt: {_quoted(prompt)} given, a list must hold only texts, only token ids, or only lists of token ids"
    )


def _chat_sizes(body: JsonObject) -> tuple[list[int], bool]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestRefusedError(f"messages: {_quoted(messages)} given, a non-empty list is expected")
    total = sum(_message_bytes(message) for message in messages)
    tools = body.get("tools")
    if tools is not None:
        total += _text_bytes(json.dumps(tools, ensure_ascii=False))
    return [total], False


def _message_bytes(message: object) -> int:
    if not isinstance(message, dict):
        return 0
    content, calls = message.get("content"), message.get("tool_calls")
    total = _text_bytes(json.dumps(calls, ensure_ascii=False)) if calls else 0
    if isinstance(content, str):
        return total + _text_bytes(content)
    if isinstance(content, list):
        total += sum(_part_bytes(part) for part in content)
    return total


def _part_bytes(part: object) -> int:
    """Bytes of text in one part of a message. What else it holds, a picture above all, is no text to be tokenised."""
    if isinstance(part, str):
        return _text_bytes(part)
    texts = [part.get(key) for key in _TEXT_KEYS] if isinstance(part, dict) else []
    return sum(_text_bytes(text) for text in texts if isinstance(text, str))


def _is_media(part: object) -> bool:
    """Whether a part may hold something else than text. Parts may come without a type, so their keys decide."""
    if not isinstance(part, dict):
        return not isinstance(part, str)
    return not _MEDIA_KEYS.isdisjoint(part) or not any(key in part for key in _TEXT_KEYS)


def _count_media(messages: Sequence[object] | None) -> int:
    parts = 0
    for message in messages or ():
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            parts += sum(1 for part in content if _is_media(part))
    return parts


def _text_bytes(text: str) -> int:
    # surrogatepass: JSON may carry lone surrogates, which are the engine's to refuse.
    return len(text.encode("utf-8", "surrogatepass"))


def _whole_reason(api: Api, body: JsonObject) -> str | None:
    """Requests whose answer needs what only the engine that computes the prompt has.

    Decode receives KV, not the prompt's logits; beam search starts many engine requests of its own; truncation to
    "what fits" depends on max_tokens, which differs between the legs.
    """
    if body.get("use_beam_search"):
        return "beam search"
    if body.get("prompt_logprobs") is not None:
        return "prompt log-probabilities"
    if body.get("truncate_prompt_tokens") == -1:
        return "truncation to the room that max_tokens leaves"
    if api is Api.COMPLETION:
        if body.get("echo") and body.get("logprobs") is not None:
            return "echo with log-probabilities"
        if body.get("prompt_embeds") is not None:
            return "prompt embeddings"
    return None
