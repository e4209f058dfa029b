"""Taking a proxy down while requests are running."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import pytest
from proxy_harness import chain, make_config, post, until
from rd2h_client.client import MetaClient
from rd2h_proxy import service


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
