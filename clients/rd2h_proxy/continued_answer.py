"""An engine's answer whose choices are continued when Decode gives them back; otherwise it is unchanged."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Protocol

from rd2h_proxy.answer_leg import MAX_EVENT_BYTES, EngineAnswer, reading
from rd2h_proxy.continuation import Continuation, Piece, cannot
from rd2h_proxy.derender import derender_choice, missing_deltas
from rd2h_proxy.dispatcher import Dispatcher, Running
from rd2h_proxy.failure import engine_failure
from rd2h_proxy.journal import RequestRecord
from rd2h_proxy.openai_request import Api
from rd2h_proxy.recompute_policy import RECOMPUTED, cannot_continue
from rd2h_proxy.sse import SseOverflowError, SseReader, event_data
from rd2h_proxy.stream_shape import StreamShape
from rd2h_proxy.token_account import Choice, TokenAccount, read_plain
from rd2h_proxy.whole_answer import finish_whole

_GIVEN_BACK = re.compile(rb'"stop_reason":\s*"recomputed"')
_MARK_BYTES = 40
_MERGE_QUEUE = 32


class Answer(Protocol):
    """What the relay sends to a client."""

    content_type: str
    head: bytes
    streaming: bool

    async def next_chunk(self) -> bytes:
        """The next bytes after `head`; empty at the end."""

    async def close(self) -> None:
        """Ends what `next_chunk` has begun."""


async def continued(
    dispatcher: Dispatcher, running: Running, client_headers: Mapping[str, str], record: RequestRecord
) -> Answer:
    """The answer to relay for an attempt.

    Raises:
        AttemptError: Decode gave a complete answer back and it cannot be continued.
    """
    answer = running.answer
    if not running.request.tracks_tokens:
        guarded = GuardedAnswer(running)
        guarded.check(answer.head)
        return guarded
    if answer.streaming:
        return ContinuedStream(dispatcher, running, client_headers, record)
    answer.head = await finish_whole(dispatcher, running, client_headers, record)
    return GuardedAnswer(running)


class GuardedAnswer:
    """A stream passed through byte for byte; that it was given back is at least not hidden."""

    def __init__(self, running: Running) -> None:
        self._answer = running.answer
        self._request = running.request
        self.content_type = self._answer.content_type
        self.head = self._answer.head
        self._tail = self.head[-_MARK_BYTES:]
        self.streaming = self._answer.streaming

    async def next_chunk(self) -> bytes:
        """See Answer."""
        chunk = await self._answer.next_chunk()
        self.check(self._tail + chunk)
        self._tail = chunk[-_MARK_BYTES:]
        return chunk

    async def close(self) -> None:
        """See Answer."""

    def check(self, window: bytes) -> None:
        """Raises AttemptError when the engine gave the request back in these bytes."""
        # The plain search is quick; the exact one makes sure that it is not text of the answer.
        if b"recomputed" in window and _GIVEN_BACK.search(window):
            raise cannot(cannot_continue(self._request) or "token ids are not kept for this engine")


class ContinuedStream:
    """Follows the token ids of a stream; when Decode gives choices back, their rest follows in the same stream."""

    def __init__(
        self, dispatcher: Dispatcher, running: Running, client_headers: Mapping[str, str], record: RequestRecord
    ) -> None:
        self._dispatcher = dispatcher
        self._running = running
        self._headers = client_headers
        self._record = record
        self._answer: EngineAnswer = running.answer
        self._account = TokenAccount()
        self._reader = SseReader(MAX_EVENT_BYTES)
        self._shape = StreamShape(running.request)
        # Only parsed messages and offsets of log-probabilities need to know what text was sent before.
        self._text_matters = bool(running.request.body.get("tools")) or bool(running.request.body.get("logprobs"))
        self._held: list[bytes] = []
        self._rest: AsyncGenerator[bytes, None] | None = None
        self.content_type = self._answer.content_type
        self.head = self._pass(self._answer.head)
        self.streaming = True

    async def next_chunk(self) -> bytes:
        """See Answer."""
        while self._rest is None:
            chunk = await self._answer.next_chunk()
            if not chunk:
                self._rest = self._after_the_end()
            elif passed := self._pass(chunk):
                return passed
        return await anext(self._rest, b"")

    async def close(self) -> None:
        """See Answer."""
        if self._rest is not None:
            await self._rest.aclose()

    async def _after_the_end(self) -> AsyncGenerator[bytes, None]:
        """What follows when the engine's stream is over: continuations, and the events that waited for them."""
        if rest := self._reader.rest:
            yield rest
        given_back = self._account.given_back()
        if given_back:
            # Decode is done with it. Keeping its place would make the continuation wait for itself.
            self._running.lease.release()
            async with aclosing(self._continue(given_back)) as events:
                async for event in events:
                    yield event
        for event in self._held:
            yield self._shape.with_usage(event)

    def _pass(self, chunk: bytes) -> bytes:
        if self._text_matters or self._reader.holding:
            return self._pass_parsed(chunk)
        plain = read_plain(chunk)
        if plain is None or plain.choice not in self._account.choices:
            return self._pass_parsed(chunk)
        self._account.take_plain(plain)
        return chunk if self._running.request.shows_token_ids else plain.hidden

    def _pass_parsed(self, chunk: bytes) -> bytes:
        try:
            events = self._reader.feed(chunk)
        except SseOverflowError as error:
            raise engine_failure(self._answer.blame, self._answer.address, str(error)) from error
        with reading(self._answer):
            return b"".join(map(self._pass_event, events))

    def _pass_event(self, event: bytes) -> bytes:
        data = event_data(event)
        if data is None or not data.startswith(b"{"):
            return self._hold_or_pass(event)
        try:
            message = json.loads(data)
        except ValueError:
            return event
        self._account.take_event(message)
        choices = message.get("choices")
        if not choices:
            return self._hold_or_pass(event)
        self._shape.learn(message)
        self._text_matters = self._text_matters or any(map(self._account.is_parsed, choices))
        if any(choice.get("stop_reason") == RECOMPUTED for choice in choices):
            return self._shape.without_the_end(message)
        return self._shape.shown(event, message)

    def _hold_or_pass(self, event: bytes) -> bytes:
        """Usage and [DONE] wait until the last continuation has ended."""
        if self._account.given_back():
            self._held.append(event)
            return b""
        return event

    async def _continue(self, choices: Sequence[Choice]) -> AsyncGenerator[bytes, None]:
        """The events of all continuations as they come; at most a few wait for a slow client."""
        queue: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue(_MERGE_QUEUE)

        async def produce(choice: Choice) -> None:
            try:
                async with aclosing(self._events(choice)) as events:
                    async for event in events:
                        await queue.put(event)
                await queue.put(None)
            except Exception as error:  # noqa: BLE001 - carried to the reader, which raises it
                await queue.put(error)

        tasks = [asyncio.create_task(produce(choice)) for choice in choices]
        try:
            running = len(tasks)
            while running:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _events(self, choice: Choice) -> AsyncGenerator[bytes, None]:
        request = self._running.request
        parsed = needs_parser(self._running, choice)
        rest = Continuation(self._dispatcher, request, choice, self._headers, self._record, raw_text=parsed)
        async with aclosing(rest.pieces()) as pieces:
            async for piece in pieces:
                self._shape.count(piece)
                if not parsed:
                    yield self._shape.event(choice, piece)
                    choice.text_length += len(piece.text)
                elif piece.finish_reason is not None:
                    for event in await self._parsed_rest(choice, piece):
                        yield event

    async def _parsed_rest(self, choice: Choice, last: Piece) -> list[bytes]:
        session, address = self._dispatcher.router.session, self._record.decode
        finish = last.finish_reason or "stop"
        made = await derender_choice(session, address, self._running.request, choice, finish, self._headers)
        deltas = missing_deltas(choice, made.get("message") or {})
        return self._shape.delta_events(choice, deltas, made.get("finish_reason") or finish, last.stop_reason)


def needs_parser(running: Running, choice: Choice) -> bool:
    """Whether the engine's parsers have to see the whole text of a choice."""
    request = running.request
    return request.api is Api.CHAT and (request.may_call_tools or choice.parsed)
