"""Continuing the given-back choices of a complete (not streamed) answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import aclosing

from rd2h_proxy.answer_leg import reading
from rd2h_proxy.continuation import Continuation
from rd2h_proxy.derender import derender_choice
from rd2h_proxy.dispatcher import Dispatcher, Running
from rd2h_proxy.journal import RequestRecord
from rd2h_proxy.logprobs import as_chat, merged, shifted
from rd2h_proxy.openai_request import Api, JsonObject
from rd2h_proxy.recompute_policy import RECOMPUTED
from rd2h_proxy.stream_shape import added_usage, compact
from rd2h_proxy.token_account import Choice, TokenAccount, hide_token_ids


async def finish_whole(
    dispatcher: Dispatcher, running: Running, client_headers: Mapping[str, str], record: RequestRecord
) -> bytes:
    """The answer's JSON with every choice finished.

    Raises:
        AttemptError: a choice cannot be continued.
    """
    raw = running.answer.head
    if b"recomputed" not in raw:
        return raw if running.request.shows_token_ids else hide_token_ids(raw)
    account = TokenAccount()
    with reading(running.answer):
        answer = json.loads(raw)
        account.take_answer(answer)
        given_back = [choice for choice in answer["choices"] if choice.get("stop_reason") == RECOMPUTED]
    running.lease.release()
    finisher = _Finisher(dispatcher, running, client_headers, record)
    tasks = [
        asyncio.create_task(finisher.finish(choice, account.choices[choice.get("index") or 0])) for choice in given_back
    ]
    try:
        added = sum(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if isinstance(answer.get("usage"), dict):
        answer["usage"] = added_usage(answer["usage"], added)
    made = compact(answer)
    return made if running.request.shows_token_ids else hide_token_ids(made)


class _Finisher:
    def __init__(
        self, dispatcher: Dispatcher, running: Running, client_headers: Mapping[str, str], record: RequestRecord
    ) -> None:
        self._dispatcher = dispatcher
        self._request = running.request
        self._headers = client_headers
        self._record = record

    async def finish(self, choice: JsonObject, state: Choice) -> int:
        """Completes one choice object in place; returns how many tokens were added."""
        chat = self._request.api is Api.CHAT
        parsed = chat and self._parsed(choice)
        before = len(state.generated_ids)
        text = "" if chat else choice.get("text") or ""
        logprobs = choice.get("logprobs")
        added = ""
        round_offset = 0
        rest = Continuation(self._dispatcher, self._request, state, self._headers, self._record, raw_text=parsed)
        async with aclosing(rest.pieces()) as pieces:
            async for piece in pieces:
                if piece.first:
                    round_offset = len(text) + len(added)
                part = as_chat(piece.logprobs) if chat else shifted(piece.logprobs, round_offset)
                logprobs = merged(logprobs, part)
                added += piece.text
                choice["finish_reason"], choice["stop_reason"] = piece.finish_reason, piece.stop_reason
        choice["logprobs"] = logprobs
        choice["token_ids"] = list(state.generated_ids)
        if not chat:
            choice["text"] = text + added
        elif not parsed:
            choice["message"]["content"] = (choice["message"].get("content") or "") + added
        else:
            session, address = self._dispatcher.router.session, self._record.decode
            finish = choice["finish_reason"] or "stop"
            made = await derender_choice(session, address, self._request, state, finish, self._headers)
            choice["message"] = made.get("message") or {}
            choice["finish_reason"] = made.get("finish_reason") or finish
        return len(state.generated_ids) - before

    def _parsed(self, choice: JsonObject) -> bool:
        message = choice.get("message") or {}
        return self._request.may_call_tools or any(
            message.get(key) for key in ("reasoning", "reasoning_content", "tool_calls")
        )
