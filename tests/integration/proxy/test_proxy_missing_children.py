"""An answer has begun, some of its children have not come, and the meta service is no help: the stream ends."""

from __future__ import annotations

import asyncio

from proxy_harness import META_COMMAND, Chain, Process, chain, meta_address, start_meta, until

SOON_S = 15.0


async def rest_of_stream(c: Chain, broken: asyncio.Event) -> bytes:
    """What follows in a stream of two children, of which Decode can hold one, after `broken`."""
    c.decode.script.capacity, c.decode.script.chunks, c.decode.script.delay_s = 1, 100_000, 0.05
    body = {"prompt": ["x", "y"], "stream": True}
    async with c.session.post(c.url + "/v1/completions", json=body) as response:
        await response.content.readany()
        broken.set()
        async with asyncio.timeout(SOON_S):
            return await response.content.read()


async def test_a_meta_service_that_stays_away_ends_the_stream(meta: str) -> None:
    service = await start_meta()
    try:
        async with chain(meta_address(service), "--rendezvous-s", "2", "--meta-outage-s", "0.5") as c:
            broken = asyncio.Event()
            reading = asyncio.create_task(rest_of_stream(c, broken))
            await broken.wait()
            await service.kill()
            rest = await reading
            assert b"meta service" in rest.rsplit(b"data: ", 1)[-1]
            assert b"[DONE]" not in rest
            await until(lambda: c.decode.active == 0, "Decode was aborted")
    finally:
        await service.kill()


async def test_a_restarted_meta_service_that_refuses_the_rest_ends_the_stream(meta: str) -> None:
    service = await start_meta()
    address = meta_address(service)
    command = (*service.command[:1], *META_COMMAND, "--listen", address, "--max-children", "1")
    try:
        async with chain(address) as c:
            broken = asyncio.Event()
            reading = asyncio.create_task(rest_of_stream(c, broken))
            await broken.wait()
            await service.kill()
            service = await Process.start(*command, marker="rd2h meta: serving on")
            rest = await reading
            assert b"expected_children" in rest.rsplit(b"data: ", 1)[-1]
            assert b"[DONE]" not in rest
            await until(lambda: c.decode.active == 0, "Decode was aborted")
    finally:
        await service.kill()
