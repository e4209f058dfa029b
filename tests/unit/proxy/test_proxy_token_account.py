"""Token ids of streams: the quick reader must agree with the JSON parser, whatever the text says."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rd2h_proxy.token_account import Choice, TokenAccount, hide_token_ids, read_plain

NASTY = ['"token_ids":[1]', '"finish_reason":null', '"index":7,', '","token_ids":[9],"x":"', "\n\n", 'data: {"', "\\"]


def event(choice: dict[str, Any], **fields: Any) -> bytes:
    text = json.dumps({"id": "x", "choices": [choice], **fields}, separators=(",", ":"), ensure_ascii=False)
    return b"data: " + text.encode() + b"\n\n"


texts = st.lists(st.one_of(st.sampled_from(NASTY), st.text(alphabet=st.characters(codec="utf-8")))).map("".join)


@given(texts, st.lists(st.integers(0, 200_000), min_size=1, max_size=5), st.integers(0, 12), st.booleans())
def test_plain_events_are_read_as_the_parser_reads_them(text: str, ids: list[int], index: int, chat: bool) -> None:
    choice: dict[str, Any] = {"index": index}
    choice["delta" if chat else "text"] = {"content": text} if chat else text
    choice.update(logprobs=None, finish_reason=None, token_ids=ids)
    raw = event(choice)
    plain = read_plain(raw)
    if plain is None:
        # Only a text that looks like the beginning of a list or an object may send an event to the parser.
        assert '":[' in text or '":{' in text or '"reasoning' in text
        return
    assert (plain.choice, plain.token_ids) == (index, ids)
    assert plain.hidden == hide_token_ids(raw)
    shown = json.loads(plain.hidden.removeprefix(b"data: "))["choices"][0]
    assert shown == {**choice, "token_ids": None}


@pytest.mark.parametrize(
    "raw",
    [
        event({"index": 0, "text": "x", "finish_reason": "stop", "stop_reason": "recomputed", "token_ids": [1]}),
        event({"index": 0, "text": "x", "finish_reason": None, "token_ids": None}),
        event({"index": 0, "text": "x", "finish_reason": None, "token_ids": [1], "prompt_token_ids": [2]}),
        event({"index": 0, "text": "x", "logprobs": {"tokens": []}, "finish_reason": None, "token_ids": [1]}),
        event({"index": 0, "delta": {"content": "a", "reasoning": "b"}, "finish_reason": None, "token_ids": [1]}),
        event({"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None, "token_ids": [1]}),
        event({"index": 0, "delta": {}, "finish_reason": None, "token_ids": [1]}),
        event({"index": 0, "delta": {"reasoning": "r"}, "finish_reason": None, "token_ids": [1]}),
        event({"index": 0, "delta": {"tool_calls": [{}]}, "finish_reason": None, "token_ids": [1]}),
        event({"index": 0, "text": "x", "finish_reason": None, "token_ids": [1]}, usage={"prompt_tokens": 1}),
        event({"index": 0, "text": "x", "finish_reason": None, "token_ids": [1]})[:-1],
        event({"index": 0, "text": "x", "finish_reason": None, "token_ids": [1]}) * 2,
        b": comment\n\n",
        b"data: [DONE]\n\n",
        b"",
    ],
)
def test_everything_uncommon_is_left_to_the_parser(raw: bytes) -> None:
    assert read_plain(raw) is None


def test_choices_keep_prompt_and_generated_ids() -> None:
    account = TokenAccount()
    account.take_event({"choices": [{"index": 0, "delta": {"role": "assistant"}}], "prompt_token_ids": [1, 2]})
    account.take_event({"choices": [{"index": 0, "delta": {"content": "a"}, "token_ids": [3]}]})
    account.take_event({"choices": [{"index": 0, "delta": {}, "token_ids": [4], "stop_reason": "recomputed"}]})
    (choice,) = account.given_back()
    assert list(choice.prompt_ids) == [1, 2]
    assert list(choice.generated_ids) == [3, 4]
    assert choice.content == "a"


@pytest.mark.parametrize("index", [-3, 10**6, "0", 1.5, True])
def test_an_impossible_index_of_a_tool_call_takes_no_memory(index: object) -> None:
    choice = Choice(0)
    part = {"index": index, "function": {"name": "f", "arguments": "{}"}}
    choice.take_delta({"delta": {"tool_calls": [part]}})
    assert choice.tool_calls == []
