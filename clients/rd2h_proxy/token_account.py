"""Token ids and text that a client has been given so far, choice by choice."""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from rd2h_proxy.openai_request import JsonObject
from rd2h_proxy.recompute_policy import RECOMPUTED

# An index beyond this is nonsense, and must not make a list of that length.
_MAX_TOOL_CALLS = 1024
# Inside a JSON text quotes are escaped, so these names can only be keys.
_ID_LISTS = re.compile(rb'"(prompt_token_ids|token_ids)":\s*\[[\d,\s]*\]')


def hide_token_ids(raw: bytes) -> bytes:
    """The JSON without the ids that only the proxy asked for: null, as an engine writes that was not asked."""
    return _ID_LISTS.sub(rb'"\1":null', raw)


_GOES_ON = b'"finish_reason":null'
_IDS = b'"token_ids":['
_INDEX = b'"index":'
_CONTENT = b'"delta":{"content":"'


class PlainEvent(NamedTuple):
    """What is in an event of the common kind, read without parsing its JSON."""

    choice: int
    token_ids: list[int]
    hidden: bytes
    """The event without its token ids."""


def read_plain(chunk: bytes) -> PlainEvent | None:
    """The content of a chunk that is one event of the common kind: one choice that goes on, with text and ids only.

    None for all others; they are left to the JSON parser. Only compact JSON, as vLLM writes it, is recognised. Texts
    cannot deceive this: a quote in them is escaped, so `"key"` within a text never looks like a key, and what looks
    like the beginning of a list or an object only sends the event to the parser.
    """
    start = chunk.find(_IDS)
    place = chunk.find(_INDEX)
    if start < 0 or place < 0 or _GOES_ON not in chunk or not chunk.startswith(b"data: {"):
        return None
    # Lists: the choices and the ids. Objects: the delta of a chat. Anything more is log-probabilities, usage, tools.
    if chunk.count(b'":[') != 2 or chunk.count(b'":{') != (_CONTENT in chunk) or b'"reasoning' in chunk:
        return None
    if chunk.find(b"\n\n") != len(chunk) - 2:
        return None
    start += len(_IDS)
    end = chunk.find(b"]", start)
    place += len(_INDEX)
    try:
        ids = [int(number) for number in chunk[start:end].split(b",")]
        index = int(chunk[place : chunk.index(b",", place)])
    except ValueError:
        return None
    return PlainEvent(index, ids, b"".join((chunk[: start - 1], b"null", chunk[end + 1 :])))


@dataclass(slots=True)
class ToolCall:
    """What of one tool call has been streamed."""

    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class Choice:
    """One choice of the answer."""

    index: int
    prompt_ids: array[int] = field(default_factory=lambda: array("I"))
    generated_ids: array[int] = field(default_factory=lambda: array("I"))
    text_length: int = 0
    """Characters of completion text, for the offsets of log-probabilities."""
    round_offset: int = 0
    """`text_length` when the present continuation began."""
    content: str = ""
    reasoning: str = ""
    reasoning_key: str = "reasoning"
    """The key under which this engine version streams reasoning."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    given_back: bool = False
    """Whether Decode ended it with the wish to be asked again."""

    @property
    def parsed(self) -> bool:
        """Whether a parser of the engine has taken the text apart."""
        return bool(self.reasoning or self.tool_calls)

    def take_ids(self, choice: JsonObject) -> None:
        """Adds what one choice object of an answer or event says about ids and how it ended."""
        if isinstance(ids := choice.get("prompt_token_ids"), list):
            self.prompt_ids = array("I", ids)
        if isinstance(ids := choice.get("token_ids"), list):
            self.generated_ids.extend(ids)
        if choice.get("stop_reason") == RECOMPUTED:
            self.given_back = True

    def take_delta(self, choice: JsonObject) -> None:
        """Adds the text of one streamed choice object."""
        self.text_length += len(choice.get("text") or "")
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            return
        self.content += delta.get("content") or ""
        for key in ("reasoning", "reasoning_content"):
            if delta.get(key):
                self.reasoning_key = key
                self.reasoning += delta[key]
        for part in delta.get("tool_calls") or ():
            self._take_tool_call(part)

    def _take_tool_call(self, part: JsonObject) -> None:
        index = part.get("index")
        if index is None:
            index = 0
        if type(index) is not int or not 0 <= index < _MAX_TOOL_CALLS:
            # The derendered message will show that the call is missing here.
            return
        while len(self.tool_calls) <= index:
            self.tool_calls.append(ToolCall())
        function = part.get("function") or {}
        self.tool_calls[index].name += function.get("name") or ""
        self.tool_calls[index].arguments += function.get("arguments") or ""


@dataclass(slots=True)
class TokenAccount:
    """All choices of one answer."""

    choices: dict[int, Choice] = field(default_factory=dict)
    _chat_prompt_ids: array[int] = field(default_factory=lambda: array("I"))

    def take_event(self, event: JsonObject) -> None:
        """Adds one streamed event."""
        self._take_prompt(event)
        for choice in event.get("choices") or ():
            state = self._choice(choice)
            state.take_ids(choice)
            state.take_delta(choice)

    def take_plain(self, event: PlainEvent) -> None:
        """Adds the ids of an event of the common kind; its text is not kept."""
        self.choices[event.choice].generated_ids.extend(event.token_ids)

    def take_answer(self, answer: JsonObject) -> None:
        """Adds a complete answer."""
        self._take_prompt(answer)
        for choice in answer.get("choices") or ():
            self._choice(choice).take_ids(choice)

    def is_parsed(self, choice: JsonObject) -> bool:
        """Whether a parser of the engine works on the choice that an event belongs to."""
        return self._choice(choice).parsed

    def given_back(self) -> list[Choice]:
        """Choices that have to be continued."""
        return [choice for choice in self.choices.values() if choice.given_back]

    def _take_prompt(self, message: JsonObject) -> None:
        # Chat has one prompt and tells it beside the choices; completions tell it in each choice.
        if isinstance(ids := message.get("prompt_token_ids"), list):
            self._chat_prompt_ids = array("I", ids)

    def _choice(self, choice: JsonObject) -> Choice:
        index = choice.get("index") or 0
        state = self.choices.get(index)
        if state is None:
            state = self.choices[index] = Choice(index, self._chat_prompt_ids)
        return state
