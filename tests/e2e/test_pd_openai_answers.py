"""Every kind of OpenAI request has the same answer through the proxy as from one engine (X6)."""

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from rd2h.demo.engine_spec import SERVED_NAME
from rd2h.demo.process import ManagedProcess

pytestmark = [pytest.mark.e2e, pytest.mark.pd, pytest.mark.timeout(300)]

# Different for every request or engine, and not part of the answer.
_VARYING = ("id", "created", "kv_transfer_params", "system_fingerprint")
TEXT = "The quick brown fox jumps over the lazy dog. " * 4
CHAT = [
    {"role": "system", "content": "You answer."},
    {"role": "user", "content": "Tell me something."},
    {"role": "assistant", "content": "Something."},
    {"role": "user", "content": "And more."},
]
COMPLETIONS: dict[str, dict[str, Any]] = {
    "one token": {"prompt": TEXT, "max_tokens": 1},
    "one-token prompt": {"prompt": [65]},
    "echo": {"prompt": "Echo this.", "echo": True},
    "echo with logprobs": {"prompt": "Echo this.", "echo": True, "logprobs": 2},
    "echo only": {"prompt": "Echo this.", "echo": True, "max_tokens": 0},
    "logprobs": {"prompt": TEXT, "logprobs": 3},
    "prompt logprobs": {"prompt": "Short.", "prompt_logprobs": 1},
    "token ids": {"prompt": TEXT, "return_token_ids": True},
    "choices": {"prompt": TEXT, "n": 2, "seed": 5, "temperature": 0.7},
    "list": {"prompt": ["One prompt.", "Another prompt."], "n": 2, "seed": 5, "temperature": 0.7},
    "stop": {"prompt": TEXT, "stop": ["e"]},
    "truncated": {"prompt": TEXT, "truncate_prompt_tokens": 20},
    "truncated to fit": {"prompt": TEXT, "truncate_prompt_tokens": -1},
}
CHATS: dict[str, dict[str, Any]] = {
    "chat": {},
    "chat choices": {"n": 2, "seed": 5, "temperature": 0.7},
    "chat logprobs": {"logprobs": True, "top_logprobs": 2},
    "chat echo": {"echo": True},
    "tools not used": {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "tool_choice": "none",
    },
    "json": {"response_format": {"type": "json_object"}, "max_tokens": 24},
}


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
        if key == "choices":
            for choice in value:
                _join(whole.setdefault(f"choice {choice['index']}", {}), choice)
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


def requests() -> list[Any]:
    """All cases, streamed and not."""
    cases = []
    for name, body in COMPLETIONS.items():
        cases.append(pytest.param("/v1/completions", body, id=name))
        if "prompt_logprobs" not in body:
            streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
            cases.append(pytest.param("/v1/completions", streamed, id=f"{name} streamed"))
    for name, body in CHATS.items():
        chat = {"messages": CHAT, **body}
        cases.append(pytest.param("/v1/chat/completions", chat, id=name))
        cases.append(pytest.param("/v1/chat/completions", {**chat, "stream": True}, id=f"{name} streamed"))
    return cases


@pytest.mark.parametrize(("path", "body"), requests())
def test_same_answer(path: str, body: dict[str, Any], proxy: ManagedProcess, single: ManagedProcess) -> None:
    status, text = ask(single.url, path, body)
    proxied_status, proxied_text = ask(proxy.url, path, body)
    assert status == 200, text
    assert proxied_status == status, proxied_text
    assert differences(normalised(proxied_text), normalised(text)) == []


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "x", "max_tokens": -1},
        {"prompt": "x", "temperature": 99},
        {"prompt": "x" * 100_000},
        {"prompt": "x", "model": "another"},
        {"prompt": "", "max_tokens": 2},
    ],
    ids=["max_tokens", "temperature", "too long", "model", "empty"],
)
def test_same_refusal(body: dict[str, Any], proxy: ManagedProcess, single: ManagedProcess) -> None:
    status, text = ask(single.url, "/v1/completions", body)
    proxied_status, proxied_text = ask(proxy.url, "/v1/completions", body)
    assert 400 <= status < 500
    assert (proxied_status, json.loads(proxied_text)) == (status, json.loads(text))
