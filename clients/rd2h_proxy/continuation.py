"""Continuing one choice from its token ids, as often as Decode gives it back."""

from __future__ import annotations

import json
from array import array
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from rd2h_proxy.answer_leg import MAX_EVENT_BYTES, reading
from rd2h_proxy.dispatcher import Dispatcher, Running, Tried
from rd2h_proxy.errors import ErrorAnswer, ProxyError
from rd2h_proxy.failure import AttemptError, Blame, engine_failure
from rd2h_proxy.journal import RequestRecord
from rd2h_proxy.leg_body import encode
from rd2h_proxy.openai_request import Api, JsonObject, OpenAiRequest, parse_request
from rd2h_proxy.phase import Life, Phase
from rd2h_proxy.recompute_policy import RECOMPUTED
from rd2h_proxy.sse import SseOverflowError, SseReader, event_data
from rd2h_proxy.token_account import Choice

MAX_ROUNDS = 16
_COMPLETION_DEFAULT_TOKENS = 16

# Sampling parameters with one meaning in both APIs. Everything else of a chat body is about messages or the answer.
_SAMPLING = (
    "model",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "allowed_token_ids",
    "bad_words",
    "priority",
    "cache_salt",
    "user",
    "vllm_xargs",
    "return_tokens_as_token_ids",
)


@dataclass(frozen=True, slots=True)
class Piece:
    """Some tokens of a continuation."""

    text: str
    token_ids: list[int]
    logprobs: JsonObject | None
    """In the form of the completions API."""
    finish_reason: str | None
    stop_reason: Any
    first: bool
    """Whether this is the first of its round."""


def cannot(reason: str) -> AttemptError:
    """The end of a request that was given back and cannot go on."""
    text = f"Decode gave the request back to be computed again, which is not possible: {reason}"
    return AttemptError(ErrorAnswer.make(502, text), text, Blame.PROXY)


class Continuation:
    """Asks for the rest of one choice through /v1/completions with the prompt and the generated ids as prompt."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        request: OpenAiRequest,
        choice: Choice,
        client_headers: Mapping[str, str],
        record: RequestRecord,
        raw_text: bool,
    ) -> None:
        """`raw_text`: special tokens stay in the text, because a parser will read it."""
        self._dispatcher = dispatcher
        self._request = request
        self._choice = choice
        self._headers = client_headers
        self._record = record
        self._raw_text = raw_text

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """The rest of the choice. The last piece has a finish reason.

        Raises:
            AttemptError, ProxyError: it cannot be had.
        """
        choice = self._choice
        if not choice.prompt_ids:
            raise cannot("the engine did not tell the token ids")
        for _ in range(MAX_ROUNDS):
            budget = self._tokens_left()
            if budget is not None and budget <= 0:
                yield Piece("", [], None, "length", None, first=True)
                return
            choice.given_back = False
            self._record.continuations += 1
            async with aclosing(self._round(budget)) as pieces:
                async for piece in pieces:
                    choice.generated_ids.extend(piece.token_ids)
                    if piece.stop_reason == RECOMPUTED:
                        choice.given_back = True
                        if piece.text or piece.token_ids:
                            yield Piece(piece.text, piece.token_ids, piece.logprobs, None, None, piece.first)
                        break
                    yield piece
                    if piece.finish_reason is not None:
                        return
            if not choice.given_back:
                raise cannot("the continuation ended without a finish reason")
        raise cannot(f"it was given back {MAX_ROUNDS} times")

    async def _round(self, budget: int | None) -> AsyncGenerator[Piece, None]:
        """One request, tried on another engine as long as it has given nothing."""
        request = parse_request(Api.COMPLETION, encode(self._body(budget)), 1)
        name = f"{self._record.request_id}-c{self._record.continuations}-{self._choice.index}"
        record = RequestRecord(name, request.api.value, Life(Phase.QUEUED, self._record.life.since))
        tried = Tried()
        begun = False
        while True:
            try:
                async with self._dispatcher.attempt(request, self._headers, record, tried) as running:
                    self._record.decode, self._record.prefill = record.decode, record.prefill
                    async with aclosing(self._read(running)) as pieces:
                        async for piece in pieces:
                            begun = True
                            yield piece
                return
            except AttemptError as failure:
                tried.add(failure)
                if begun or not self._dispatcher.may_retry(failure, request, record, tried):
                    raise
            except ProxyError as error:
                raise AttemptError(error.answer, str(error), Blame.PROXY) from error
            record.life = Life(Phase.QUEUED, record.life.since)

    async def _read(self, running: Running) -> AsyncGenerator[Piece, None]:
        answer = running.answer
        reader = SseReader(MAX_EVENT_BYTES)
        first = True
        async with aclosing(answer.whole_stream()) as chunks:
            async for chunk in chunks:
                try:
                    events = reader.feed(chunk)
                except SseOverflowError as error:
                    raise engine_failure(answer.blame, answer.address, str(error)) from error
                for event in events:
                    with reading(answer):
                        message = _message(event)
                    if message is None:
                        continue
                    if "error" in message:
                        raise AttemptError(
                            ErrorAnswer(502, json.dumps(message).encode()), "error event", answer.blame, answer.address
                        )
                    with reading(answer):
                        pieces = self._pieces_of(message, answer.address, first)
                    for piece in pieces:
                        yield piece
                        first = False

    def _pieces_of(self, message: JsonObject, address: str, first: bool) -> list[Piece]:
        pieces: list[Piece] = []
        for choice in message.get("choices") or ():
            self._check_prompt(choice, address)
            pieces.append(_piece(choice, first and not pieces))
        return pieces

    def _check_prompt(self, choice: JsonObject, address: str) -> None:
        """An engine that shortened or changed the prompt would continue something else."""
        ids = choice.get("prompt_token_ids")
        if isinstance(ids, list) and array("I", ids) != self._choice.prompt_ids + self._choice.generated_ids:
            raise engine_failure(Blame.DECODE, address, "continued from other token ids than it was given")

    def _tokens_left(self) -> int | None:
        body = self._request.body
        if self._request.api is Api.COMPLETION:
            limit = body.get("max_tokens", _COMPLETION_DEFAULT_TOKENS)
        else:
            limit = body.get("max_completion_tokens") or body.get("max_tokens")
        return limit - len(self._choice.generated_ids) if isinstance(limit, int) else None

    def _body(self, budget: int | None) -> JsonObject:
        body, choice = self._request.body, self._choice
        made = {key: body[key] for key in _SAMPLING if key in body}
        made["prompt"] = [*choice.prompt_ids, *choice.generated_ids]
        made.update(n=1, stream=True, return_token_ids=True, max_tokens=budget)
        if isinstance(least := body.get("min_tokens"), int) and least > len(choice.generated_ids):
            made["min_tokens"] = least - len(choice.generated_ids)
        if isinstance(seed := body.get("seed"), int):
            # The same seed again would repeat the random numbers that the first tokens were drawn with.
            made["seed"] = (seed + len(choice.generated_ids)) % 2**63
        if (logprobs := _logprobs(self._request)) is not None:
            made["logprobs"] = logprobs
        if self._raw_text:
            made["skip_special_tokens"] = False
        return made


def _logprobs(request: OpenAiRequest) -> int | None:
    body = request.body
    if request.api is Api.COMPLETION:
        value = body.get("logprobs")
    else:
        value = (body.get("top_logprobs") or 0) if body.get("logprobs") else None
    return value if isinstance(value, int) else None


def _message(event: bytes) -> JsonObject | None:
    data = event_data(event)
    if data is None or data == b"[DONE]":
        return None
    try:
        message = json.loads(data)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def _piece(choice: JsonObject, first: bool) -> Piece:
    text = choice.get("text") or ""
    if not isinstance(text, str):
        raise TypeError(f"text: {type(text).__name__} given, a text is expected")
    return Piece(
        text=text,
        # The array refuses what cannot be a token id.
        token_ids=list(array("I", choice.get("token_ids") or ())),
        logprobs=choice.get("logprobs"),
        finish_reason=choice.get("finish_reason"),
        stop_reason=choice.get("stop_reason"),
        first=first,
    )
