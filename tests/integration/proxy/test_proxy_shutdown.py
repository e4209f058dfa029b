"""Taking a proxy down while requests are running."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import pytest
from proxy_harness import chain, make_config, post, until
from rd2h_client.client import MetaClient
from rd2h_proxy import service
from rd2h_proxy.dispatcher import Dispatcher, Tried
from rd2h_proxy.limits import ServingLimits
from rd2h_proxy.openai_request import Api, parse_request
from rd2h_proxy.phase import Phase


async def test_requests_that_do_not_end_are_cut_after_the_drain_time(
    meta: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_DRAIN_S", 1.5)
    async with chain(meta) as c, aiohttp.ClientSession() as session, MetaClient(meta) as client:
        c.prefill.gate = asyncio.Event()
        aborted_before = (await client.stats()).totals["rendezvous_aborted"]
        config = make_config(meta, [c.prefill.address], [c.decode.address])
        async with service.running(config, client) as proxy:
            url = f"http://{proxy.address}/v1/completions"
            request = asyncio.create_task(post(session, url, {"prompt": "x", "stream": True}))
            await until(lambda: c.prefill.active == 1, "Prefill has the request")
            began = time.monotonic()
        took_s = time.monotonic() - began
        assert 1.4 < took_s < 2.5
        with pytest.raises(aiohttp.ClientError):
            await request
        assert not proxy.journal.in_flight
        assert (await client.stats()).totals["rendezvous_aborted"] == aborted_before + 1
        await until(lambda: c.decode.active == c.prefill.active == 0, "both engines have heard of the end")


@pytest.mark.parametrize("cancels", [1, 2, 3, 6])
async def test_an_attempt_that_is_cancelled_again_while_it_ends_still_tells_everybody(meta: str, cancels: int) -> None:
    async with chain(meta) as c, MetaClient(meta) as client:
        c.decode.script.silent = True
        aborted_before = (await client.stats()).totals["rendezvous_aborted"]
        router, journal = c.proxy.router, c.proxy.journal
        dispatcher = Dispatcher(router, ServingLimits())
        request = parse_request(Api.COMPLETION, b'{"prompt": "x"}', 10)
        record = journal.begin("again", "/v1/completions")

        async def run() -> None:
            async with dispatcher.attempt(request, {}, record, Tried()):
                raise AssertionError("Decode never answers")

        task = asyncio.create_task(run())
        await until(lambda: c.decode.active == 1, "Decode has the request")
        for _ in range(cancels):
            task.cancel()
            await asyncio.sleep(0)
        await asyncio.gather(task, return_exceptions=True)
        journal.finish(record, Phase.ABORTED, 0)
        await c.settled()
        assert (await client.stats()).totals["rendezvous_aborted"] == aborted_before + 1
