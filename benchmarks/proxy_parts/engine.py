"""Engines for the benchmark: a Decode that streams stamped chunks at a fixed pace, and a Prefill that feeds it.

Both are as cheap as can be, so that the proxy is what is measured. Run as `python -m benchmarks.proxy_parts.engine`.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import time
from typing import Any

import aiohttp
from aiohttp import web
from rd2h_client.client import MetaClient
from rd2h_client.v1.engine_registry_pb2 import (
    ENGINE_ROLE_DECODE,
    ENGINE_ROLE_PREFILL,
    ENGINE_STATE_SERVING,
    Engine,
    EngineRole,
    Layout,
)
from rd2h_client.v1.rendezvous_pb2 import OUTCOME_DONE, Child

# A chunk as vLLM writes it, with the time of writing.
_CHUNK = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1700000000,"t":%d,'
    b'"model":"model","choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null,"stop_reason":null,'
    b'"prompt_token_ids":null,"token_ids":%s}]}\n\n'
)


class DecodeEngine:
    """Streams `max_tokens` chunks, one every `user` milliseconds; with a rendezvous only after its KV has come."""

    def __init__(self, meta: MetaClient) -> None:
        self._meta = meta
        self._waiting: dict[str, asyncio.Event] = {}
        self.port = 0

    def routes(self) -> list[web.RouteDef]:
        """What it serves."""
        return [web.post("/v1/completions", self._generate), web.post("/kv", self._kv), web.get("/health", _health)]

    async def _kv(self, http: web.Request) -> web.Response:
        for token in await http.json():
            self._waiting.pop(token).set()
        return web.Response()

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        if params := body.get("kv_transfer_params"):
            await self._receive(params)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        pace_s = float(body["user"]) / 1000
        ids = b"[12345]" if body.get("return_token_ids") else b"null"
        due = time.monotonic() + secrets.randbelow(1000) / 1000 * pace_s
        for _ in range(body["max_tokens"]):
            await asyncio.sleep(due - time.monotonic())
            due += pace_s
            await response.write(_CHUNK % (time.monotonic_ns(), ids))
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _receive(self, params: dict[str, Any]) -> None:
        token = secrets.token_bytes(16)
        arrived = self._waiting[token.hex()] = asyncio.Event()
        child = Child(
            request_id=f"cmpl-{params['x_request_id']}-0",
            token=token,
            engine_id="bench-decode",
            generation=1,
            host="127.0.0.1",
            base_port=self.port,
            tp_size=1,
            wire_version=1,
            prompt_tokens=100,
        )
        await self._meta.advertise(params["rendezvous_id"], child)
        await arrived.wait()
        await self._meta.withdraw(params["rendezvous_id"], child.request_id, OUTCOME_DONE)


class PrefillEngine:
    """Tells Decode at once that the KV is there."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    def routes(self) -> list[web.RouteDef]:
        """What it serves."""
        return [web.post("/v1/completions", self._generate), web.get("/health", _health)]

    async def _generate(self, http: web.Request) -> web.Response:
        children = (await http.json())["kv_transfer_params"]["batch_kv_transfer_params"].values()
        child = next(iter(children))
        url = f"http://{child['remote_host']}:{child['remote_port']}/kv"
        async with self._session.post(url, json=[entry["token"] for entry in children]):
            return web.json_response({"choices": []})


async def _health(_http: web.Request) -> web.Response:
    return web.Response()


async def _serve(app: web.Application) -> int:
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    port: int = runner.addresses[0][1]
    return port


def _registration(name: str, role: EngineRole, port: int) -> Engine:
    layout = Layout(transfer_backend="host", fingerprint=b"1" * 32)
    decode = role == ENGINE_ROLE_DECODE
    return Engine(
        engine_id=name,
        generation=1,
        role=role,
        host="127.0.0.1" if decode else "",
        base_port=port if decode else 0,
        tp_size=1,
        http_address=f"127.0.0.1:{port}",
        state=ENGINE_STATE_SERVING,
        layout=layout,
    )


async def _main(meta_address: str) -> None:
    async with MetaClient(meta_address) as meta, aiohttp.ClientSession() as session:
        decode = DecodeEngine(meta)
        decode_app, prefill_app = web.Application(), web.Application()
        decode_app.add_routes(decode.routes())
        prefill_app.add_routes(PrefillEngine(session).routes())
        decode.port = await _serve(decode_app)
        prefill_port = await _serve(prefill_app)
        await meta.register(_registration("bench-decode", ENGINE_ROLE_DECODE, decode.port))
        await meta.register(_registration("bench-prefill", ENGINE_ROLE_PREFILL, prefill_port))
        print(f"ready {prefill_port} {decode.port}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("meta")
    asyncio.run(_main(parser.parse_args().meta))
