"""Tool calls through the proxy are those of one engine (X6): forced ones, which a grammar holds to the tools, and calls
that the engine's parser finds in free text. Both come out of a random model, because a grammar leaves it no choice."""

import json
import re
from typing import Any

import pytest
from engine_state import wait_idle
from openai_answers import ask, differences, normalised

from rd2h.demo.chain import ConnectedEngine
from rd2h.demo.process import ManagedProcess

pytestmark = [pytest.mark.e2e, pytest.mark.pd, pytest.mark.timeout(300)]
PATH = "/v1/chat/completions"
CITIES = ["Oslo", "Rome", "San Jos\u00e9"]


def tool(name: str, properties: dict[str, Any], strict: bool = True) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    function = {"name": name, "description": f"Tells the {name}.", "parameters": schema, "strict": strict}
    return {"type": "function", "function": function}


WEATHER = tool("weather", {"city": {"type": "string", "enum": CITIES}, "days": {"type": "integer", "enum": [1, 2, 30]}})
TIME = tool("time", {"zone": {"type": "string", "pattern": "^[A-Z]{3,9}$"}})
LOOSE = tool("anything", {"of": {"type": "string"}}, strict=False)
NAMED = {"type": "function", "function": {"name": "weather"}}
CHAT = [{"role": "user", "content": "Is it warm there, and how late?"}]
CALL = {"id": "call-1", "type": "function", "function": {"name": "time", "arguments": '{"zone": "CET"}'}}
HISTORY = [
    *CHAT,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call-1", "content": "noon"},
]
# What a model that was trained for it writes when it wants to call tools by its own will.
WRITTEN = (
    r"[a-z]{5}<tool_call>\n"
    r'\{"name": "time", "arguments": \{"zone": "[A-Z]{12}"\}\}\n</tool_call>'
    r'<tool_call>\n\{"name": "weather", "arguments": \{"city": "(Oslo|Rome)", "days": [1-9]\}\}\n</tool_call>'
)
ANSWER_FORMAT = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "schema": {
            "type": "object",
            "properties": {"text": {"type": "string", "pattern": "^[a-z]{8}$"}},
            "required": ["text"],
            "additionalProperties": False,
        },
    },
}
CASES: dict[str, dict[str, Any]] = {
    "required": {"tool_choice": "required"},
    "required, one call": {"tool_choice": "required", "parallel_tool_calls": False},
    "required, loose": {"tool_choice": "required", "tools": [LOOSE], "max_tokens": 60},
    "required, choices": {"tool_choice": "required", "n": 3, "seed": 5, "temperature": 0.3},
    "required, logprobs": {"tool_choice": "required", "logprobs": True, "top_logprobs": 2},
    "required after a call": {"tool_choice": "required", "messages": HISTORY},
    "required, cut short": {"tool_choice": "required", "max_tokens": 60},
    "named": {"tool_choice": NAMED},
    "named, cut short": {"tool_choice": NAMED, "max_tokens": 60},
    "named after a call": {"tool_choice": NAMED, "messages": HISTORY},
    "auto, the model calls": {"tool_choice": "auto", "tools": [LOOSE], "structured_outputs": {"regex": WRITTEN}},
    "default, the model calls": {"tools": [LOOSE], "structured_outputs": {"regex": WRITTEN}},
    "auto, the model talks": {"tool_choice": "auto", "max_tokens": 24},
    "auto, answer in a format": {"tool_choice": "auto", "response_format": ANSWER_FORMAT},
    "auto after a call": {"tool_choice": "auto", "messages": HISTORY, "max_tokens": 24},
    "none": {"tool_choice": "none", "max_tokens": 24},
}
# In all others calls must come out whole; without them the comparison would say nothing of tool calls.
NOT_CALLING = {name for name in CASES if "cut" in name or "talks" in name or "format" in name} | {
    # Free arguments and drawn tokens may fill all of max_tokens with blanks.
    "required, loose",
    "required, choices",
    "auto after a call",
    "none",
}


def question(case: str, **fields: Any) -> dict[str, Any]:
    return {"messages": CHAT, "tools": [WEATHER, TIME], "max_tokens": 300, **CASES[case], **fields}


def calls_in(text: str) -> list[list[dict[str, Any]]]:
    """Tool calls of every choice, put together from a stream if it is one."""
    if not text.startswith("data: "):
        return [choice["message"].get("tool_calls") or [] for choice in json.loads(text)["choices"]]
    choices: dict[int, dict[int, dict[str, Any]]] = {}
    for event in [json.loads(line[6:]) for line in text.split("\n\n") if line and line != "data: [DONE]"]:
        for choice in event["choices"]:
            calls = choices.setdefault(choice["index"], {})
            for part in choice["delta"].get("tool_calls") or ():
                # The first part names the call, and only the first does.
                known = part["index"] in calls
                assert bool(part.get("id")) != known, part
                assert bool(part["function"].get("name")) != known, part
                call = calls.setdefault(part["index"], {**part, "function": {**part["function"], "arguments": ""}})
                call["function"]["arguments"] += part["function"].get("arguments") or ""
    return [[*calls.values()] for _, calls in sorted(choices.items())]


def check_calls(case: str, text: str) -> None:
    """The calls are what was asked for: known tools, arguments that fit the schema, an id of their own."""
    every = calls_in(text)
    assert all(every), "a choice without a call"
    ids = [call["id"] for calls in every for call in calls]
    assert len(set(ids)) == len(ids)
    for call in (call for calls in every for call in calls):
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        if name == "weather":
            assert set(arguments) == {"city", "days"}
            assert arguments["city"] in CITIES
        elif name == "time":
            assert re.fullmatch("[A-Z]{3,12}", arguments["zone"])
        else:
            raise AssertionError(f"{case}: a call of {name}")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("case", CASES)
def test_same_calls(case: str, stream: bool, proxy: ManagedProcess, single: ManagedProcess) -> None:
    body = question(case, stream=stream, **({"stream_options": {"include_usage": True}} if stream else {}))
    status, text = ask(single.url, PATH, body)
    assert status == 200, text
    proxied_status, proxied_text = ask(proxy.url, PATH, body)
    assert proxied_status == status, proxied_text
    assert differences(normalised(proxied_text), normalised(text)) == []
    if case not in NOT_CALLING:
        check_calls(case, text)
        check_calls(case, proxied_text)


def test_a_streamed_call_is_the_whole_one(proxy: ManagedProcess) -> None:
    (whole,) = calls_in(ask(proxy.url, PATH, question("required"))[1])
    (streamed,) = calls_in(ask(proxy.url, PATH, question("required", stream=True))[1])

    def content(calls: list[dict[str, Any]]) -> list[tuple[str, Any]]:
        return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]

    assert content(streamed) == content(whole) != []


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": {"type": "function", "function": {"name": "absent"}}},
        {"tool_choice": "required", "tools": []},
        {"tool_choice": "required", "tools": None},
        {"tool_choice": "perhaps"},
        {"tools": [{"type": "function", "function": {"parameters": {}}}]},
        {"tools": "weather"},
        {"tool_choice": "required", "tools": [tool("f", {"x": {"type": "string", "pattern": "(("}})]},
        {"tool_choice": "auto", "tools": [LOOSE], "structured_outputs": {"regex": "(("}},
        {"messages": [*CHAT, {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "time"}}]}]},
    ],
    ids=["absent", "no tools", "null tools", "choice", "nameless", "no list", "pattern", "regex", "no arguments"],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_same_refusal(
    fields: dict[str, Any],
    stream: bool,
    proxy: ManagedProcess,
    single: ManagedProcess,
    prefill: ConnectedEngine,
    decode: ConnectedEngine,
) -> None:
    body = question("auto, the model talks", **{"stream": stream, **fields})
    refusal = ask(single.url, PATH, body)
    if refusal[1].startswith("data: "):
        # An engine says so only after its 200, as the first event; the proxy makes it the status.
        event = json.loads(refusal[1].split("\n\n")[0][6:])
        refusal = event["error"]["code"], json.dumps(event)
    status, text = refusal
    assert 400 <= status < 500, text
    proxied_status, proxied_text = ask(proxy.url, PATH, body)
    assert (proxied_status, json.loads(proxied_text)) == (status, json.loads(text))
    wait_idle(prefill, decode)
