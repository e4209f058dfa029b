"""What the proxy understands of OpenAI bodies, and the bodies of the two legs."""

import json
import re

import pytest
from rd2h_client.v1.rendezvous_pb2 import Child
from rd2h_proxy.errors import RequestRefusedError
from rd2h_proxy.leg_body import LegIds, decode_body, prefill_body
from rd2h_proxy.openai_request import Api, JsonObject, OpenAiRequest, parse_request
from rd2h_proxy.recompute_policy import cannot_continue

IDS = LegIds("rendezvous", "base")


def completion(**fields: object) -> OpenAiRequest:
    body = {"model": "m", "prompt": "hello", **fields}
    return parse_request(Api.COMPLETION, json.dumps(body).encode(), 100)


def child(prompt: int, choice: int = 0) -> Child:
    return Child(request_id=f"{choice}_cmpl-base-{prompt}", token=bytes(16), prompt_index=prompt, choice_index=choice)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("text", 1), ([1, 2, 3], 1), (["a", "b"], 2), ([[1], [2, 3], [4]], 3), (["only"], 1)],
)
def test_children_are_prompts_times_choices(prompt: object, prompts: int) -> None:
    assert completion(prompt=prompt).expected_children == prompts
    assert completion(prompt=prompt, n=3).expected_children == prompts * 3


def test_chat_has_one_prompt() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "n": 2}
    assert parse_request(Api.CHAT, json.dumps(body).encode(), 100).expected_children == 2


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[1]",
        b"{",
        b'{"prompt": NaN}',
        b'{"prompt": {}}',
        b'{"prompt": []}',
        b'{"prompt": ["a", 1]}',
        b'{"prompt": "a", "n": 0}',
        b'{"prompt": "a", "n": true}',
        b'{"prompt": "a", "n": "2"}',
        b'{"prompt": "a", "n": 101}',
        b'{"prompt": "a", "stream": "yes"}',
        b'{"prompt": "a", "kv_transfer_params": {"metaserver": "grpc://evil:1"}}',
        b'{"prompt": "\xff"}',
        b'{"a":' * 100_000,
    ],
)
def test_unusable_bodies_are_refused_with_400(raw: bytes) -> None:
    with pytest.raises(RequestRefusedError) as caught:
        parse_request(Api.COMPLETION, raw, 100)
    assert caught.value.answer.status == 400
    assert json.loads(caught.value.answer.body)["error"]["code"] == 400


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt": "a", "stream": "' + b"A" * 1_000_000 + b'"}',
        b'{"prompt": "a", "stream": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"prompt": "a", "n": {"x": "' + b"A" * 1_000_000 + b'"}}',
        b'{"prompt": ["a", "b"], "n": ' + b"9" * 4300 + b"}",
        json.dumps({"prompt": [*(["x" * 1000] * 1000), 1]}).encode(),
        json.dumps({"prompt": {f"{number}" + "x" * 1000: "y" * 1000 for number in range(1000)}}).encode(),
        json.dumps({"prompt": [[[["x" * 1000] * 10] * 10] * 10, "x"]}).encode(),
    ],
)
def test_a_refusal_does_not_give_a_large_value_back(raw: bytes) -> None:
    with pytest.raises(RequestRefusedError) as caught:
        parse_request(Api.COMPLETION, raw, 100)
    assert len(caught.value.answer.body) < 500


@pytest.mark.parametrize(
    ("api", "body", "message"),
    [
        (Api.COMPLETION, {"prompt": 5}, "prompt: 5 given, a text, a list of token ids"),
        (Api.COMPLETION, {"prompt": ["a", 5]}, "prompt: ['a', 5] given, a list must hold only texts"),
        (Api.CHAT, {"messages": "hello"}, "messages: 'hello' given, a non-empty list is expected"),
    ],
)
def test_a_refusal_names_the_value(api: Api, body: dict[str, object], message: str) -> None:
    with pytest.raises(RequestRefusedError, match=f"^{re.escape(message)}"):
        parse_request(api, json.dumps(body).encode(), 100)


@pytest.mark.parametrize(
    "fields",
    [
        {"use_beam_search": True},
        {"echo": True, "logprobs": 1},
        {"prompt_logprobs": 1},
        {"truncate_prompt_tokens": -1},
    ],
)
def test_what_needs_the_prompt_pass_runs_whole(fields: dict[str, object]) -> None:
    assert completion(**fields).whole_reason is not None


@pytest.mark.parametrize("fields", [{"echo": True}, {"logprobs": 3}, {"max_tokens": 1}, {"truncate_prompt_tokens": 5}])
def test_everything_else_is_split(fields: dict[str, object]) -> None:
    assert completion(**fields).whole_reason is None


def test_decode_gets_the_clients_body_and_the_rendezvous() -> None:
    request = completion(n=2, logprobs=5, unknown_field={"kept": [1]}, request_id="client's")
    body = decode_body(request, IDS, "grpc://meta:1")
    assert body.pop("kv_transfer_params") == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "metaserver": "grpc://meta:1",
        "rendezvous_id": "rendezvous",
        "x_request_id": "base",
    }
    assert body == {"model": "m", "prompt": "hello", "n": 2, "logprobs": 5, "unknown_field": {"kept": [1]}}
    assert "kv_transfer_params" not in request.body


def test_prefill_computes_one_token_and_feeds_every_child() -> None:
    request = completion(
        prompt=["a", "b"],
        n=2,
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=77,
        min_tokens=7,
        logprobs=2,
        seed=3,
        echo=True,
    )
    children = [child(prompt, choice) for prompt in (0, 1) for choice in (0, 1)]
    body = prefill_body(request, IDS, children)
    params = body.pop("kv_transfer_params")
    assert body == {
        "model": "m",
        "prompt": ["a", "b"],
        "seed": 3,
        "echo": False,
        "n": 1,
        "stream": False,
        "max_tokens": 1,
        "min_tokens": 1,
        "max_completion_tokens": 1,
    }
    assert params["do_remote_decode"] is True
    assert params["rendezvous_id"] == "rendezvous"
    assert params["x_request_id"] == "base"
    places = [(entry["prompt_index"], entry["choice_index"]) for entry in params["batch_kv_transfer_params"].values()]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_sub_list_holds_only_its_prompts_and_counts_anew() -> None:
    request = completion(prompt=["a", "b", "c", "d"])
    body = prefill_body(request, IDS, [child(1), child(3)])
    assert body["prompt"] == ["b", "d"]
    entries = body["kv_transfer_params"]["batch_kv_transfer_params"]
    assert {key: entry["prompt_index"] for key, entry in entries.items()} == {"0_cmpl-base-1": 0, "0_cmpl-base-3": 1}


def test_a_prompt_with_all_its_choices_in_one_wave_is_sent_once() -> None:
    body = prefill_body(completion(prompt=["a", "b"], n=3), IDS, [child(1, choice) for choice in range(3)])
    assert body["prompt"] == ["b"]
    entries = body["kv_transfer_params"]["batch_kv_transfer_params"]
    assert [entry["prompt_index"] for entry in entries.values()] == [0, 0, 0]


def test_estimates_use_tokens_where_they_are_given() -> None:
    assert completion(prompt=[5] * 300).prompt_tokens(4.0) == 300
    assert completion(prompt="x" * 400).prompt_tokens(4.0) == 100


def chat(*parts: object, **fields: object) -> OpenAiRequest:
    body = {"messages": [{"role": "user", "content": list(parts)}], **fields}
    return parse_request(Api.CHAT, json.dumps(body).encode(), 10)


TEXT_PART = {"type": "text", "text": "x" * 40}
PICTURE = "data:image/png;base64," + "A" * 4_000_000


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": PICTURE}},
        {"image_url": PICTURE},
        {"type": "image_url", "image_url": {"url": PICTURE}, "text": ""},
        {"type": "image_embeds", "image_embeds": PICTURE},
        {"type": "input_audio", "input_audio": {"data": PICTURE, "format": "wav"}},
        {"type": "image_url", "image_url": None, "uuid": "known"},
        {"type": "something new", "data": PICTURE},
    ],
)
def test_a_picture_counts_as_a_picture_however_many_bytes_it_has(part: object) -> None:
    request = chat(TEXT_PART, part)
    assert request.media_tokens == 1000
    assert request.prompt_tokens(4.0) == 1010
    assert chat(TEXT_PART, part, part).prompt_tokens(4.0) == 2010


@pytest.mark.parametrize("part", [TEXT_PART, "x" * 40, {"type": "thinking", "thinking": "x" * 40}])
def test_a_part_of_text_is_no_picture(part: object) -> None:
    request = chat(part)
    assert request.media_tokens == 0
    assert request.prompt_sizes == (40,)


def test_tools_and_earlier_calls_are_text_of_the_prompt() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "\u96ea" * 1000}}]
    assert 3000 <= chat(TEXT_PART, tools=tools).prompt_sizes[0] - 40 < 3100
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "y" * 1000}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    request = parse_request(Api.CHAT, json.dumps({"messages": messages}).encode(), 10)
    assert 1001 <= request.prompt_sizes[0] < 1100


@pytest.mark.parametrize(
    ("fields", "constrained"),
    [
        ({}, False),
        ({"tool_choice": "auto"}, False),
        ({"tool_choice": "none", "strict": True, "parallel_tool_calls": False}, False),
        ({"strict": True}, True),
        ({"tool_choice": "auto", "strict": True}, True),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, True),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, True),
    ],
)
def test_calls_that_obey_a_grammar_are_not_continued_from_token_ids(fields: JsonObject, constrained: bool) -> None:
    strict = fields.get("strict")
    tools = [{"type": "function", "function": {"name": "f", "strict": strict}}]
    rest = {key: value for key, value in fields.items() if key != "strict"}
    assert (cannot_continue(chat(TEXT_PART, tools=tools, **rest)) is not None) is constrained


def test_tools_of_another_kind_are_left_to_the_engine() -> None:
    kinds: tuple[object, ...] = ("text", {}, [1], [{"function": 1}], None)
    for tools in kinds:
        assert cannot_continue(chat(TEXT_PART, tools=tools)) is None
