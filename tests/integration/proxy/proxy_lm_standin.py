"""A Decode stand-in whose tokens depend on every token before them, and which gives requests back.

A continuation from exactly the right token ids gives exactly the text of an uninterrupted run; any other prompt does
not. Tokens are byte values, as with a byte-level tokenizer.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from proxy_standins import DecodeStandIn

Json = dict[str, Any]
LETTERS = "abcdefghijklmnop qrstuvwxyz"


def next_token(ids: list[int]) -> int:
    """The next token after a prefix."""
    return ord(LETTERS[hashlib.sha256(json.dumps(ids).encode()).digest()[0] % len(LETTERS)])


def generate(prompt: list[int], count: int) -> list[int]:
    """Greedy generation."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids))
    return ids[len(prompt) :]


def decode(ids: list[int]) -> str:
    return bytes(ids).decode()


def parse_message(text: str) -> Json:
    """The engine's tool parser: three characters of content, the rest are a call's arguments."""
    message: Json = {"role": "assistant", "content": text[:3]}
    if len(text) > 3:
        message["tool_calls"] = [{"id": "call-1", "type": "function", "function": {"name": "f", "arguments": text[3:]}}]
    return message


@dataclass
class LmDecode(DecodeStandIn):
    """Generates `max_tokens` tokens, but gives every request back after `give_back_after` of them while
    `give_backs` are left."""

    give_back_after: int = 0
    give_backs: int = 0
    offers_derender: bool = True
    pause_s: float = 0.0
    """Time between events."""
    derenders: list[Json] = field(default_factory=list)

    def _common_routes(self) -> list[web.RouteDef]:
        return [*super()._common_routes(), web.post("/v1/chat/completions/derender", self._derender)]

    async def _derender(self, http: web.Request) -> web.Response:
        if not self.offers_derender:
            return web.json_response({"error": {"message": "disabled"}}, status=403)
        body = await http.json()
        self.derenders.append(body)
        choice = body["generate_response"]["choices"][0]
        made = {"index": 0, "message": parse_message(decode(choice["token_ids"])), "finish_reason": "tool_calls"}
        return web.json_response({"choices": [made]})

    def _prompts(self, body: Json) -> list[list[int]]:
        if "messages" in body:
            return [list(json.dumps([body["messages"], body.get("tools")]).encode())]
        prompt = body["prompt"]
        if isinstance(prompt, str):
            return [list(prompt.encode())]
        if isinstance(prompt[0], int):
            return [prompt]
        return [list(item.encode()) if isinstance(item, str) else item for item in prompt]

    async def _answer(self, http: web.Request, body: Json) -> web.StreamResponse:
        params, n = body["kv_transfer_params"], body.get("n") or 1
        prompts = self._prompts(body)
        texts = [json.dumps(body["messages"])] if "messages" in body else None
        runs = []
        for index, prompt in enumerate(prompts):
            text = texts[0] if texts else self._sent_text(body, index)
            for choice in range(n):
                request_id = f"{choice}_cmpl-{params['x_request_id']}-{index}-00000000"
                await self._receive(params["rendezvous_id"], request_id, text, (index, choice))
                runs.append(self._run(body, prompt, index * n + choice))
        if body.get("stream"):
            return await self._stream_runs(http, body, runs)
        return web.json_response(self._complete(body, runs), dumps=compact)

    @staticmethod
    def _sent_text(body: Json, index: int) -> str:
        prompt = body["prompt"]
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            prompt = [prompt]
        return prompt[index] if isinstance(prompt[index], str) else json.dumps(prompt[index])

    def _run(self, body: Json, prompt: list[int], index: int) -> Json:
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or 20
        tokens = generate(prompt, limit)
        finish, stop = "length", None
        if self.give_backs and len(tokens) > self.give_back_after:
            self.give_backs -= 1
            tokens, finish, stop = tokens[: self.give_back_after], "stop", "recomputed"
        return {"index": index, "prompt": prompt, "tokens": tokens, "finish": finish, "stop": stop}

    @staticmethod
    def _logprobs(tokens: list[int], offset: int, chat: bool) -> Json:
        if chat:
            entry = [{"token": chr(t), "logprob": -t / 100, "bytes": [t], "top_logprobs": []} for t in tokens]
            return {"content": entry}
        return {
            "tokens": [chr(t) for t in tokens],
            "token_logprobs": [-t / 100 for t in tokens],
            "top_logprobs": [{} for _ in tokens],
            "text_offset": [offset + i for i in range(len(tokens))],
        }

    async def _stream_runs(self, http: web.Request, body: Json, runs: list[Json]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        chat, ids = "messages" in body, bool(body.get("return_token_ids"))
        usage = (body.get("stream_options") or {}).get("include_usage")
        frame = {"id": "the-id", "object": "chunk", "created": 1, "model": "lm"}

        async def send(message: Json) -> None:
            await response.write(b"data: " + compact(message).encode() + b"\n\n")

        if chat:
            for run in runs:
                role = {"index": run["index"], "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                await send({**frame, "choices": [role], "prompt_token_ids": run["prompt"] if ids else None})
        # Two tokens an event, choices taking turns.
        for start in range(0, max(len(run["tokens"]) for run in runs) or 1, 2):
            for run in runs:
                part = run["tokens"][start : start + 2]
                last = start + 2 >= len(run["tokens"])
                if not part and not (last and start == 0):
                    continue
                choice: Json = {"index": run["index"]}
                if chat:
                    choice["delta"] = self._delta(body, run["tokens"], start, len(part))
                else:
                    choice["text"] = decode(part)
                wants = body.get("logprobs") is not None and body.get("logprobs") is not False
                choice["logprobs"] = self._logprobs(part, start, chat) if wants else None
                choice["finish_reason"] = run["finish"] if last else None
                if last or not chat:
                    choice["stop_reason"] = run["stop"] if last else None
                if not chat:
                    choice["prompt_token_ids"] = run["prompt"] if ids and start == 0 else None
                choice["token_ids"] = part if ids else None
                await send({**frame, "choices": [choice]})
                await asyncio.sleep(self.pause_s)
        if usage:
            await send({**frame, "choices": [], "usage": self._usage(runs)})
        await response.write(b"data: [DONE]\n\n")
        return response

    @staticmethod
    def _delta(body: Json, tokens: list[int], start: int, count: int) -> Json:
        text = decode(tokens)
        if not body.get("tools"):
            return {"content": text[start : start + count]}
        delta: Json = {}
        if content := text[start : start + count][: max(0, 3 - start)]:
            delta["content"] = content
        if arguments := text[max(3, start) : start + count]:
            function: Json = {"arguments": arguments}
            call: Json = {"index": 0, "function": function}
            if start <= 3:
                function["name"] = "f"
                call.update(id="call-1", type="function")
            delta["tool_calls"] = [call]
        return delta

    @staticmethod
    def _usage(runs: list[Json]) -> Json:
        prompts, generated = sum(len(run["prompt"]) for run in runs), sum(len(run["tokens"]) for run in runs)
        return {"prompt_tokens": prompts, "total_tokens": prompts + generated, "completion_tokens": generated}

    def _complete(self, body: Json, runs: list[Json]) -> Json:
        chat, ids = "messages" in body, bool(body.get("return_token_ids"))
        choices = []
        for run in runs:
            choice: Json = {"index": run["index"]}
            text = decode(run["tokens"])
            if not chat:
                choice["text"] = text
            elif body.get("tools"):
                choice["message"] = parse_message(text)
            else:
                choice["message"] = {"role": "assistant", "content": text}
            wants = body.get("logprobs") is not None and body.get("logprobs") is not False
            choice["logprobs"] = self._logprobs(run["tokens"], 0, chat) if wants else None
            finish = "tool_calls" if chat and body.get("tools") and not run["stop"] else run["finish"]
            choice.update(finish_reason=finish, stop_reason=run["stop"])
            choice["token_ids"] = run["tokens"] if ids else None
            if not chat:
                choice["prompt_token_ids"] = run["prompt"] if ids else None
            choices.append(choice)
        answer = {"id": "the-id", "object": "answer", "created": 1, "model": "lm", "choices": choices}
        answer["usage"] = self._usage(runs)
        if chat:
            answer["prompt_token_ids"] = runs[0]["prompt"] if ids else None
        return answer


def compact(value: Any) -> str:
    """JSON as vLLM writes it."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
