"""Every kind of OpenAI request has the same answer through the proxy as from one engine (X6)."""

import json
import time
from typing import Any

import pytest
from engine_state import wait_nothing_left
from openai_answers import ask, differences, normalised
from pictures import data_url, picture

from rd2h.demo.chain import ConnectedEngine, MetaProcess
from rd2h.demo.process import ManagedProcess

pytestmark = [pytest.mark.e2e, pytest.mark.pd, pytest.mark.timeout(300)]

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


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "part",
    [
        picture(8, 8, 1),
        data_url(bytes(3_000_000)),
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "picture", "picture": "?"},
    ],
    ids=["picture", "large", "sound", "unknown"],
)
def test_same_refusal_of_a_picture_by_a_model_of_text(
    part: dict[str, Any],
    stream: bool,
    meta: MetaProcess,
    proxy: ManagedProcess,
    single: ManagedProcess,
    prefill: ConnectedEngine,
    decode: ConnectedEngine,
) -> None:
    content = [{"type": "text", "text": "What is it?"}, part]
    body = {"messages": [{"role": "user", "content": content}], "stream": stream}
    status, text = ask(single.url, "/v1/chat/completions", body)
    assert 400 <= status < 500, text
    began = time.monotonic()
    proxied_status, proxied_text = ask(proxy.url, "/v1/chat/completions", body)
    # At once: no waiting for a rendezvous that cannot come, no second engine.
    assert time.monotonic() - began < 5
    assert (proxied_status, json.loads(proxied_text)) == (status, json.loads(text))
    wait_nothing_left(meta, proxy, prefill, decode)
