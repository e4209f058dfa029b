"""Log-probabilities of continued tokens, in the form of the API that the client used."""

from __future__ import annotations

from typing import Any

from rd2h_proxy.openai_request import JsonObject


def shifted(logprobs: JsonObject | None, characters: int) -> JsonObject | None:
    """Completions form, with text offsets counted from the beginning of the whole answer."""
    if logprobs is None:
        return None
    return {**logprobs, "text_offset": [offset + characters for offset in logprobs.get("text_offset") or ()]}


def as_chat(logprobs: JsonObject | None) -> JsonObject | None:
    """Chat form of the completions form."""
    if logprobs is None:
        return None
    tops = logprobs.get("top_logprobs") or [None] * len(logprobs["tokens"])
    content = []
    for token, value, top in zip(logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True):
        alternatives = [_entry(name, number) for name, number in (top or {}).items()]
        content.append({**_entry(token, value), "top_logprobs": alternatives})
    return {"content": content}


def _entry(token: str, logprob: float | None) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode("utf-8", "surrogatepass"))}


def merged(first: JsonObject | None, second: JsonObject | None) -> JsonObject | None:
    """Two parts, both of one form, one after the other."""
    if first is None or second is None:
        return first or second
    keys = {**first, **second}
    return {
        key: [*(first.get(key) or ()), *(second.get(key) or ())] if _is_list(first, second, key) else first.get(key)
        for key in keys
    }


def _is_list(first: JsonObject, second: JsonObject, key: str) -> bool:
    return isinstance(first.get(key), list) or isinstance(second.get(key), list)
