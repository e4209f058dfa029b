"""The rest of a chat answer that the engine's parsers have to take apart: reasoning and tool calls.

A parser keeps state over the tokens, and a continuation is a new request with a fresh parser. So the tokens are
collected first, and the engine's derender endpoint turns all of them into a message; the client then gets what of the
message it has not had.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from rd2h_proxy.answer_leg import MAX_ANSWER_BYTES, describe
from rd2h_proxy.continuation import cannot
from rd2h_proxy.engine_http import AnswerTooLargeError, leg_headers, read_bounded
from rd2h_proxy.leg_body import PROXY_OWNED, encode
from rd2h_proxy.openai_request import JsonObject, OpenAiRequest
from rd2h_proxy.token_account import Choice, ToolCall

PATH = "/v1/chat/completions/derender"
_TIMEOUT = aiohttp.ClientTimeout(total=60.0)


async def derender_choice(
    session: aiohttp.ClientSession,
    address: str,
    request: OpenAiRequest,
    choice: Choice,
    finish_reason: str,
    client_headers: Mapping[str, str],
) -> JsonObject:
    """The choice object of a complete chat answer, made from all its tokens.

    Raises:
        AttemptError: the engine does not offer this, or refused.
    """
    chat_request = {key: value for key, value in request.body.items() if key not in PROXY_OWNED}
    chat_request.update(stream=False, n=1)
    chat_request.pop("stream_options", None)
    body = {
        "model": request.body.get("model"),
        "generate_response": {
            "request_id": "derender",
            "choices": [{"index": 0, "token_ids": list(choice.generated_ids), "finish_reason": finish_reason}],
        },
        "prompt_token_ids": list(choice.prompt_ids),
        "chat_request": chat_request,
    }
    headers = leg_headers(client_headers, "derender")
    try:
        async with session.post(
            f"http://{address}{PATH}", data=encode(body), headers=headers, timeout=_TIMEOUT, allow_redirects=False
        ) as response:
            answer = await read_bounded(response, MAX_ANSWER_BYTES)
            status = response.status
    except (aiohttp.ClientError, TimeoutError, OSError, AnswerTooLargeError) as error:
        raise cannot(f"{address}{PATH}: {describe(error)}") from error
    if status != 200:
        raise cannot(f"{address}{PATH} answered {status}; vLLM offers it with --enable-scale-out")
    try:
        made = json.loads(answer)["choices"][0]
    except (ValueError, LookupError, TypeError) as error:
        raise cannot(f"{address}{PATH} answered something else than a chat completion") from error
    return dict(made)


def missing_deltas(choice: Choice, message: JsonObject) -> list[JsonObject]:
    """What of a message the client has not been given, as deltas.

    Raises:
        AttemptError: the client has been given something that is not the beginning of the message.
    """
    deltas: list[JsonObject] = []
    reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
    if rest := _rest(choice.reasoning, reasoning):
        deltas.append({choice.reasoning_key: rest})
    if rest := _rest(choice.content, message.get("content") or ""):
        deltas.append({"content": rest})
    calls = message.get("tool_calls") or []
    if len(calls) < len(choice.tool_calls):
        raise cannot("a streamed tool call is not in the message")
    for index, call in enumerate(calls):
        given = choice.tool_calls[index] if index < len(choice.tool_calls) else None
        if part := _call_rest(index, given, call):
            deltas.append({"tool_calls": [part]})
    return deltas


def _call_rest(index: int, given: ToolCall | None, call: JsonObject) -> JsonObject | None:
    function: dict[str, Any] = call.get("function") or {}
    if given is None or not given.name:
        return {"index": index, "id": call.get("id"), "type": "function", "function": function}
    if given.name != function.get("name"):
        raise cannot("a streamed tool call has another name in the message")
    rest = _rest(given.arguments, function.get("arguments") or "")
    return {"index": index, "function": {"arguments": rest}} if rest else None


def _rest(given: str, whole: str) -> str:
    if not whole.startswith(given):
        raise cannot("the streamed text is not the beginning of the message")
    return whole[len(given) :]
