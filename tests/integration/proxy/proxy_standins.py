"""Scripted engines that speak real HTTP: what a Prefill and a Decode vLLM server do, as far as a proxy can see.

The data path is one HTTP call: Prefill posts every child's token and prompt to Decode, which checks both. So a child
that Prefill was never told of, or a prompt under a wrong index, shows up as a failure here too.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp
from aiohttp import web
from rd2h_client.client import MetaClient
from rd2h_client.registration import Registration
from rd2h_client.v1.engine_registry_pb2 import Engine, EngineRole, EngineState, Layout
from rd2h_client.v1.rendezvous_pb2 import Child, Outcome


class Advertiser(Protocol):
    """The part of the meta client that a Decode stand-in uses."""

    async def advertise(self, rendezvous_id: str, child: Child, ttl_s: float = ...) -> None: ...

    async def withdraw(
        self,
        rendezvous_id: str,
        request_id: str,
        outcome: Outcome,
        reason: str,
        prompt_index: int,
        choice_index: int,
    ) -> None: ...


@dataclass
class Script:
    """How a stand-in behaves; fields may be changed between requests."""

    status: int = 200
    """Answer with this status at once."""
    body: str = '{"error": {"message": "scripted", "type": "x", "code": 0}}'
    drop: bool = False
    """Close the connection instead of answering."""
    delay_s: float = 0.0
    """Work time of Prefill; time between chunks of Decode."""
    chunks: int = 4
    """Tokens a Decode child generates."""
    capacity: int = 1_000_000
    """Children that Decode can hold at a time."""
    fail_after: int | None = None
    """Decode drops the connection after so many chunks in total."""
    error_event: bool = False
    """Decode streams an error event instead of the first token."""
    empty: bool = False
    """Decode answers 200 and nothing."""
    abort_children: frozenset[tuple[int, int]] = frozenset()
    """Children (prompt, choice) that Decode ends before they advertise; they generate nothing."""
    cached_children: frozenset[tuple[int, int]] = frozenset()
    """Children that need no KV."""
    unpaced: bool = False
    """Decode sends as fast as its reader takes it, without making each token a task of its own."""
    silent: bool = False
    """Decode never advertises."""
    prompt_tokens: int | None = None
    """Length of every prompt as Decode advertises it; by default a guess from its text."""


async def start_server(app: web.Application, port: int = 0) -> tuple[web.AppRunner, int]:
    """Listens on the loopback interface; by default on a free port."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.2)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, backlog=2048)
    await site.start()
    return runner, runner.addresses[0][1]


@dataclass
class StandIn:
    """What both roles have."""

    script: Script = field(default_factory=Script)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    tokenized: list[bytes] = field(default_factory=list)
    """Bodies of /tokenize, as they came."""
    active: int = 0
    port: int = 0
    healthy: bool = True
    keep_bodies: bool = True
    whole_fails: bool = False
    """Whether the script's failures are those of requests that run whole on Prefill, too."""
    _runner: web.AppRunner | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    registration: Registration | None = None

    async def stop(self) -> None:
        if self.registration is not None:
            await self.registration.close()
            self.registration = None
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def register(self, client: MetaClient, engine_id: str, kv_dtype: str = "bfloat16", **fields: Any) -> None:
        """Joins the registry as a serving engine."""
        decode = isinstance(self, DecodeStandIn)
        layout = Layout(wire_version=1, transfer_backend="host", model="m", kv_dtype=kv_dtype, block_size_tokens=16)
        layout.fingerprint = hashlib.sha256(kv_dtype.encode()).digest()
        engine = Engine(
            engine_id=engine_id,
            generation=secrets.randbits(63) or 1,
            role=EngineRole.ENGINE_ROLE_DECODE if decode else EngineRole.ENGINE_ROLE_PREFILL,
            host="127.0.0.1" if decode else "",
            base_port=self.port if decode else 0,
            tp_size=1,
            http_address=self.address,
            state=EngineState.ENGINE_STATE_SERVING,
            layout=layout,
        )
        engine.MergeFrom(Engine(**fields))
        self.registration = await client.register(engine)

    async def _health(self, _http: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    def _common_routes(self) -> list[web.RouteDef]:
        return [
            web.get("/health", self._health),
            web.get("/v1/models", self._models),
            web.post("/tokenize", self._tokenize),
            web.post("/reset_prefix_cache", self._reset),
            web.post("/v1/completions", self._generate),
            web.post("/v1/chat/completions", self._generate),
        ]

    async def _models(self, _http: web.Request) -> web.Response:
        self.counts["models"] += 1
        return web.json_response({"object": "list", "data": [{"id": "stand-in"}]})

    async def _tokenize(self, http: web.Request) -> web.Response:
        body = await http.json()
        self.tokenized.append(await http.read())
        (prompt,) = prompts_of(body)
        return web.json_response({"tokens": list(prompt[:100].encode()), "count": len(prompt)})

    async def _reset(self, _http: web.Request) -> web.Response:
        self.counts["reset"] += 1
        return web.Response()

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        if self.keep_bodies:
            self.bodies.append(body)
            self.headers.append(http.headers)
        self.counts["requests"] += 1
        self.active += 1
        try:
            return await self._answer(http, body)
        except asyncio.CancelledError:
            self.counts["aborted"] += 1
            raise
        finally:
            self.active -= 1

    async def _answer(self, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        raise NotImplementedError

    def _scripted_failure(self, http: web.Request) -> web.StreamResponse | None:
        if self.script.drop:
            assert http.transport is not None
            http.transport.abort()
            return web.Response()
        if self.script.status != 200:
            return web.Response(status=self.script.status, text=self.script.body, content_type="application/json")
        return None


@dataclass
class PrefillStandIn(StandIn):
    """Computes nothing and sends every child its token back."""

    children: Counter[str] = field(default_factory=Counter)
    """How often each child (engine request id on Decode) was served."""
    gate: asyncio.Event | None = None
    """When set, Prefill works until the event is."""
    _session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        app = web.Application(client_max_size=64 << 20)
        app.add_routes(self._common_routes())
        self._runner, self.port = await start_server(app, self.port)

    async def stop(self) -> None:
        await super().stop()
        if self._session is not None:
            await self._session.close()

    async def _answer(self, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        params = body.get("kv_transfer_params")
        if params is None:
            if self.whole_fails and (failure := self._scripted_failure(http)) is not None:
                return failure
            return web.json_response({"choices": [{"index": 0, "text": "whole", "finish_reason": "stop"}]})
        if self.gate is not None:
            await self.gate.wait()
        if self.script.delay_s:
            await asyncio.sleep(self.script.delay_s)
        if (failure := self._scripted_failure(http)) is not None:
            return failure
        prompts = prompts_of(body)
        for child in params["batch_kv_transfer_params"].values():
            self.children[child["request_id"]] += 1
            await self._send_kv(child, prompts[child["prompt_index"]])
        return web.json_response({"choices": [{"index": i, "text": "x"} for i in range(len(prompts))]})

    async def _send_kv(self, child: dict[str, Any], prompt: str) -> None:
        assert self._session is not None
        url = f"http://{child['remote_host']}:{child['remote_port']}/kv"
        payload = {"token": child["token"], "prompt": prompt}
        try:
            async with self._session.post(url, json=payload) as response:
                self.counts[f"kv-{response.status}"] += 1
        except aiohttp.ClientError:
            self.counts["kv-lost"] += 1


@dataclass
class _Slot:
    """A Decode child that waits for KV."""

    prompt: str
    arrived: asyncio.Event


def prompts_of(body: dict[str, Any]) -> list[str]:
    """Every prompt of a body as text."""
    if "messages" in body:
        return [json.dumps(body["messages"])]
    prompt = body["prompt"]
    if isinstance(prompt, str) or all(isinstance(item, int) for item in prompt):
        prompt = [prompt]
    return [item if isinstance(item, str) else json.dumps(item) for item in prompt]


def text_of(prompt: str, choice: int, index: int) -> str:
    """The token that a child generates; telling, so that mixed-up answers show."""
    return f"[{prompt[:24]}|{choice}|{index}]"


@dataclass
class DecodeStandIn(StandIn):
    """Advertises its children, waits for their KV, and streams."""

    meta: Advertiser | None = None
    engine_id: str = "decode-0"
    slots: dict[str, _Slot] = field(default_factory=dict)
    held: int = 0
    most_held: int = 0
    generation: int = field(default_factory=lambda: secrets.randbits(63) or 1)
    _room: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def start(self) -> None:
        app = web.Application(client_max_size=64 << 20)
        app.add_routes([*self._common_routes(), web.post("/kv", self._kv)])
        self._runner, self.port = await start_server(app, self.port)

    async def _kv(self, http: web.Request) -> web.Response:
        body = await http.json()
        slot = self.slots.get(body["token"])
        if slot is None or slot.prompt != body["prompt"]:
            self.counts["kv-refused"] += 1
            return web.Response(status=409)
        slot.arrived.set()
        return web.Response()

    async def _answer(self, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if (failure := self._scripted_failure(http)) is not None:
            return failure
        params = body["kv_transfer_params"]
        prompts, n = prompts_of(body), body.get("n") or 1
        queue: asyncio.Queue[tuple[int, str, bool] | None] = asyncio.Queue()
        places = [(p, c) for p in range(len(prompts)) for c in range(n)]
        base = f"{'chatcmpl' if 'messages' in body else 'cmpl'}-{params['x_request_id']}"
        tasks = [asyncio.create_task(self._child(params, base, prompts[p], (p, c), n, queue)) for p, c in places]
        try:
            if body.get("stream"):
                return await self._stream(http, base, queue, len(places))
            return await self._whole(base, body, queue, len(places))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _child(
        self,
        params: dict[str, Any],
        base: str,
        prompt: str,
        place: tuple[int, int],
        n: int,
        queue: asyncio.Queue[tuple[int, str, bool] | None],
    ) -> None:
        assert self.meta is not None
        p, c = place
        request_id = f"{c}_{base}-{p}-{secrets.token_hex(4)}" if n > 1 else f"{base}-{p}-{secrets.token_hex(4)}"
        rendezvous_id = params["rendezvous_id"]
        index = p * n + c
        if place in self.script.abort_children:
            await self.meta.withdraw(rendezvous_id, request_id, Outcome.OUTCOME_ABORTED, "scripted", p, c)
            await queue.put((index, "", True))
            return
        async with self._room:
            await self._room.wait_for(lambda: self.held < self.script.capacity)
            self.held += 1
            self.most_held = max(self.most_held, self.held)
        try:
            if place in self.script.cached_children:
                await self.meta.withdraw(rendezvous_id, request_id, Outcome.OUTCOME_DONE, "cached", p, c)
            else:
                await self._receive(rendezvous_id, request_id, prompt, place)
            for number in range(1 if self.script.unpaced else self.script.chunks):
                await queue.put((index, text_of(prompt, c, number), number == self.script.chunks - 1))
                await asyncio.sleep(self.script.delay_s)
        finally:
            async with self._room:
                self.held -= 1
                self._room.notify_all()

    async def _receive(self, rendezvous_id: str, request_id: str, prompt: str, place: tuple[int, int]) -> None:
        assert self.meta is not None
        token = secrets.token_bytes(16)
        slot = self.slots[token.hex()] = _Slot(prompt, asyncio.Event())
        child = Child(
            request_id=request_id,
            token=token,
            engine_id=self.engine_id,
            generation=self.generation,
            host="127.0.0.1",
            base_port=self.port,
            tp_size=1,
            pcp_size=1,
            dcp_size=1,
            wire_version=1,
            layout_fingerprint=b"\1" * 32,
            prompt_index=place[0],
            choice_index=place[1],
            prompt_tokens=self.script.prompt_tokens or max(1, len(prompt) // 3),
        )
        outcome = Outcome.OUTCOME_ABORTED
        try:
            if not self.script.silent:
                await self.meta.advertise(rendezvous_id, child)
            await slot.arrived.wait()
            outcome = Outcome.OUTCOME_DONE
        finally:
            del self.slots[token.hex()]
            if not self.script.silent:
                withdraw = self.meta.withdraw(rendezvous_id, request_id, outcome, "", place[0], place[1])
                # Shielded: an abort cancels this task, and the withdrawal has to go out all the same.
                self._detached(withdraw)

    def _detached(self, work: Any) -> None:
        async def quietly() -> None:
            try:
                await work
            except Exception as error:  # noqa: BLE001 - a stand-in only counts
                self.counts[f"withdraw-{type(error).__name__}"] += 1

        task = asyncio.create_task(quietly())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def _events(
        self, queue: asyncio.Queue[tuple[int, str, bool] | None], children: int
    ) -> AsyncIterator[tuple[int, str, bool]]:
        ended = 0
        while ended < children:
            item = await queue.get()
            assert item is not None
            ended += item[2]
            yield item

    async def _stream(
        self, http: web.Request, base: str, queue: asyncio.Queue[tuple[int, str, bool] | None], children: int
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        # As uvicorn: the status line goes out before anything is known.
        await response.prepare(http)
        if self.script.empty:
            return response
        sent = 0
        if self.script.unpaced:
            await queue.get()
            for _ in range(self.script.chunks):
                await response.write(b'data: {"choices": [{"index": 0, "text": "%s"}]}\n\n' % (b"x" * 100))
                self.counts["chunks"] += 1
            return response
        async for index, text, last in self._events(queue, children):
            if self.script.error_event:
                error = {"error": {"message": "KV load failed", "type": "InternalServerError", "code": 500}}
                await response.write(f"data: {json.dumps(error)}\n\ndata: [DONE]\n\n".encode())
                return response
            if self.script.fail_after is not None and sent >= self.script.fail_after:
                assert http.transport is not None
                http.transport.abort()
                return response
            choice = {"index": index, "text": text, "finish_reason": "length" if last else None}
            chunk = {"id": base, "object": "text_completion", "model": "stand-in", "choices": [choice]}
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            sent += 1
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _whole(
        self, base: str, body: dict[str, Any], queue: asyncio.Queue[tuple[int, str, bool] | None], children: int
    ) -> web.StreamResponse:
        texts = [""] * children
        async for index, text, _ in self._events(queue, children):
            texts[index] += text
        if self.script.empty:
            return web.Response(content_type="application/json")
        if self.script.error_event:
            return web.json_response({"error": {"message": "KV load failed", "code": 500}}, status=500)
        key = "message" if "messages" in body else "text"
        choices = [
            {"index": i, key: {"role": "assistant", "content": text} if key == "message" else text}
            for i, text in enumerate(texts)
        ]
        return web.json_response({"id": base, "choices": choices})
