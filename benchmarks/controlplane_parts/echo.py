"""Bare floors: grpc.aio that echoes the advert's bytes. No table, no waiter, no second party.

Once as a unary call for each advert, and once over a bidirectional stream with whatever is pending in one message.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from typing import Any

import grpc
from rd2h_client.v1.rendezvous_pb2 import ExchangeRequest, Operation

from benchmarks.controlplane_parts.payload import as_message
from benchmarks.controlplane_parts.samples import Samples

UNARY = "/bench.Echo/Unary"
STREAM = "/bench.Echo/Stream"


def serve(pipe: Connection) -> None:
    """Run the echo server until the pipe says None."""
    asyncio.run(_serve(pipe))


async def _echo(request: bytes, context: Any) -> bytes:
    return request


async def _echo_stream(requests: AsyncIterator[ExchangeRequest], context: Any) -> AsyncIterator[ExchangeRequest]:
    async for request in requests:
        yield request


async def _serve(pipe: Connection) -> None:
    server = grpc.aio.server()
    handlers = {
        "Unary": grpc.unary_unary_rpc_method_handler(_echo),
        "Stream": grpc.stream_stream_rpc_method_handler(
            _echo_stream, ExchangeRequest.FromString, ExchangeRequest.SerializeToString
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Echo", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    pipe.send(f"127.0.0.1:{port}")
    await asyncio.to_thread(pipe.recv)
    await server.stop(1.0)


def measure(address: str, concurrency: int, duration_s: float) -> Samples:
    """Make unary calls for `duration_s`, `concurrency` at a time over one channel."""
    return asyncio.run(_measure(address, concurrency, duration_s))


async def _measure(address: str, concurrency: int, duration_s: float) -> Samples:
    payload = as_message("0" * 32).SerializeToString()
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary(UNARY, request_serializer=None, response_deserializer=None)

        async def once() -> None:
            if await call(payload) != payload:
                raise RuntimeError("the echo differs")

        await _run(once, concurrency, duration_s / 5)
        return await _run(once, concurrency, duration_s)


def measure_stream(address: str, concurrency: int, duration_s: float) -> Samples:
    """Echo adverts over one batched stream for `duration_s`, `concurrency` at a time."""
    return asyncio.run(_measure_stream(address, concurrency, duration_s))


async def _measure_stream(address: str, concurrency: int, duration_s: float) -> Samples:
    advert = as_message("0" * 32)
    loop = asyncio.get_running_loop()
    waiting: dict[int, asyncio.Future[None]] = {}
    pending = ExchangeRequest()
    wake = asyncio.Event()
    last_id = 0

    async def once() -> None:
        nonlocal last_id
        last_id += 1
        answer = waiting[last_id] = loop.create_future()
        operation: Operation = pending.operations.add(op_id=last_id)
        operation.advertise.CopyFrom(advert)
        wake.set()
        await answer

    async def write(call: Any) -> None:
        nonlocal pending
        while True:
            await wake.wait()
            wake.clear()
            batch, pending = pending, ExchangeRequest()
            await call.write(batch)

    async def read(call: Any) -> None:
        while (response := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]  # missing in the stubs
            for operation in response.operations:
                waiting.pop(operation.op_id).set_result(None)

    async with grpc.aio.insecure_channel(address) as channel:
        start: Any = channel.stream_stream(STREAM, ExchangeRequest.SerializeToString, ExchangeRequest.FromString)
        call = start()
        writer, reader = asyncio.create_task(write(call)), asyncio.create_task(read(call))
        await _run(once, concurrency, duration_s / 5)
        samples = await _run(once, concurrency, duration_s)
        writer.cancel()
        await call.done_writing()
        await reader
    return samples


async def _run(once: Any, concurrency: int, duration_s: float) -> Samples:
    samples = Samples()
    begin_s = time.perf_counter()
    until_s = begin_s + duration_s

    async def worker() -> None:
        while (sent_s := time.perf_counter()) < until_s:
            await once()
            samples.latencies_s.append(time.perf_counter() - sent_s)

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    samples.elapsed_s = time.perf_counter() - begin_s
    return samples
