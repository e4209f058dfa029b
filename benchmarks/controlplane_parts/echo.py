"""The bare floor: a grpc.aio unary call that echoes the advert's bytes. No table, no waiter, no second party."""

import asyncio
import time
from multiprocessing.connection import Connection
from typing import Any

import grpc

from benchmarks.controlplane_parts.payload import as_message
from benchmarks.controlplane_parts.samples import Samples

METHOD = "/bench.Echo/Echo"


def serve(pipe: Connection) -> None:
    """Run the echo server until the pipe says None."""
    asyncio.run(_serve(pipe))


async def _echo(request: bytes, context: Any) -> bytes:
    return request


async def _serve(pipe: Connection) -> None:
    server = grpc.aio.server()
    handlers = {"Echo": grpc.unary_unary_rpc_method_handler(_echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Echo", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    pipe.send(f"127.0.0.1:{port}")
    await asyncio.to_thread(pipe.recv)
    await server.stop(1.0)


def measure(address: str, concurrency: int, duration_s: float) -> Samples:
    """Make calls for `duration_s`, `concurrency` at a time over one channel."""
    return asyncio.run(_measure(address, concurrency, duration_s))


async def _measure(address: str, concurrency: int, duration_s: float) -> Samples:
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary(METHOD, request_serializer=None, response_deserializer=None)
        await _run(call, concurrency, duration_s / 5)
        return await _run(call, concurrency, duration_s)


async def _run(call: Any, concurrency: int, duration_s: float) -> Samples:
    samples = Samples()
    payload = as_message("0" * 32).SerializeToString()
    begin_s = time.perf_counter()
    until_s = begin_s + duration_s

    async def worker() -> None:
        while time.perf_counter() < until_s:
            sent_s = time.perf_counter()
            if await call(payload) != payload:
                raise RuntimeError("the echo differs")
            samples.latencies_s.append(time.perf_counter() - sent_s)

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    samples.elapsed_s = time.perf_counter() - begin_s
    return samples
