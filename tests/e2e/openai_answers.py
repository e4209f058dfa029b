"""Asks one OpenAI question of two servers and compares the answers."""

import json
import urllib.error
import urllib.request
from typing import Any

from rd2h.demo.engine_spec import SERVED_NAME

# Different for every request or engine, and not part of the answer.
_VARYING = ("id", "created", "kv_transfer_params", "system_fingerprint")
# Lists in streamed events whose items say which item of the whole answer they belong to.
_INDEXED = ("choices", "tool_calls")


def ask(url: str, path: str, body: dict[str, Any]) -> tuple[int, str]:
    """Status and text."""
    data = json.dumps({"model": SERVED_NAME, "temperature": 0.0, "max_tokens": 8, **body}).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def normalised(text: str) -> Any:
    """An answer without what differs from request to request. How a stream was cut into events is such a thing: an
    engine puts the tokens that wait into one."""
    if not text.startswith("data: "):
        return _strip(json.loads(text))
    lines = [line for line in text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    whole: dict[str, Any] = {}
    for line in lines[:-1]:
        _join(whole, _strip(json.loads(line[6:])))
    return whole


def _join(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Adds one event: texts and lists are put together, everything else stays or is set."""
    for key, value in part.items():
        if key in _INDEXED:
            for item in value or ():
                _join(whole.setdefault(f"{key} {item['index']}", {}), item)
        elif isinstance(value, dict):
            _join(whole.setdefault(key, {}), value)
        elif isinstance(value, str) and key in ("text", "content", "arguments"):
            whole[key] = whole.get(key, "") + value
        elif isinstance(value, list):
            whole[key] = [*(whole.get(key) or []), *value]
        elif value is not None:
            whole[key] = value


def _strip(message: Any) -> Any:
    if isinstance(message, dict):
        return {key: _strip(value) for key, value in message.items() if key not in _VARYING}
    if isinstance(message, list):
        return [_strip(item) for item in message]
    # Two runs of one engine differ in the last digits, by how their steps were batched.
    return round(message, 2) if isinstance(message, float) else message


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two answers differ, briefly."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = sorted({**one, **other})
        return [text for key in keys for text in differences(one.get(key), other.get(key), f"{where}.{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [text for index, (a, b) in pairs for text in differences(a, b, f"{where}[{index}]")]
    return [] if one == other else [f"{where}: {one!r} by the proxy, {other!r} by one engine"]
