"""Taking a proxy down while requests are running."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from aiohttp import web
from proxy_harness import Chain, chain, make_config, post, until
from proxy_standins import DecodeStandIn
from rd2h_client.client import MetaClient
from rd2h_proxy import service
from rd2h_proxy.dispatcher import Dispatcher, Tried
from rd2h_proxy.limits import ServingLimits
from rd2h_proxy.openai_request import Api, parse_request
from rd2h_proxy.phase import Phase
from rd2h_proxy.service import RunningProxy

DRAIN_S = 1.5


class Slow(DecodeStandIn):
    """Thinks about tokens for ever."""

    async def _tokenize(self, _http: web.Request) -> web.Response:
        self.counts["tokenize"] += 1
        await asyncio.sleep(60)
        return web.Response()


@asynccontextmanager
async def stopping(c: Chain, client: MetaClient, *flags: str) -> AsyncIterator[RunningProxy]:
    """Another proxy for the engines of a chain, which is stopped at the end; that must take the drain time."""
    config = make_config(c.meta, [c.prefill.address], [c.decode.address], *flags)
    async with service.running(config, client) as proxy:
        yield proxy
        began = time.monotonic()
    took_s = time.monotonic() - began
    assert DRAIN_S - 0.1 < took_s < DRAIN_S + 1.0
    assert not proxy.journal.in_flight
    assert len(proxy.router.background) == 0


@pytest.fixture(autouse=True)
def short_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_DRAIN_S", DRAIN_S)


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_that_have_not_begun_to_answer_get_503_after_the_drain_time(meta: str, stream: bool) -> None:
    async with chain(meta) as c, MetaClient(meta) as client:
        c.prefill.gate = asyncio.Event()
        before = (await client.stats()).totals
        async with stopping(c, client) as proxy:
            url = f"http://{proxy.address}/v1/completions"
            request = asyncio.create_task(post(c.session, url, {"prompt": "x", "stream": stream}))
            await until(lambda: c.prefill.active == 1, "Prefill has the request")
        reply = await request
        assert reply.status == 503
        assert reply.headers["Retry-After"]
        assert "stopping" in reply.json()["error"]["message"]
        record = proxy.journal.recent[0]
        assert (record.life.phase, record.status) == (Phase.FAILED, 503)
        assert "stopping" in record.reason
        after = (await client.stats()).totals
        assert after["rendezvous_aborted"] == before["rendezvous_aborted"] + 1
        assert after["rendezvous_failed"] == before["rendezvous_failed"]
        await until(lambda: c.decode.active == c.prefill.active == 0, "both engines have heard of the end")


@pytest.mark.parametrize("recompute", ["off", "on"])
async def test_streams_that_do_not_end_get_an_error_event_after_the_drain_time(meta: str, recompute: str) -> None:
    async with chain(meta) as c, MetaClient(meta) as client:
        c.decode.script.chunks, c.decode.script.delay_s = 10_000, 0.02
        before = (await client.stats()).totals
        async with stopping(c, client, "--recompute", recompute) as proxy:
            url = f"http://{proxy.address}/v1/completions"
            request = asyncio.create_task(post(c.session, url, {"prompt": "x", "stream": True}))
            running = proxy.journal.in_flight.values()
            await until(lambda: any(record.life.phase is Phase.STREAMING for record in running), "the stream has begun")
        reply = await request
        assert reply.status == 200
        assert not reply.broken
        assert "stopping" in reply.events[-1]["error"]["message"]
        assert reply.texts()[0].startswith("[x|0|0]")
        assert "[DONE]" not in reply.events
        record = proxy.journal.recent[0]
        assert record.life.phase is Phase.FAILED
        assert "stopping" in record.reason
        after = (await client.stats()).totals
        # All of its children were served before, so the rendezvous itself is done.
        assert after["rendezvous_done"] == before["rendezvous_done"] + 1
        await until(lambda: c.decode.active == 0, "Decode has heard of the end")


async def test_requests_that_wait_or_pass_through_get_503_after_the_drain_time(meta: str) -> None:
    async with chain(meta, decode_type=Slow) as c, MetaClient(meta) as client:
        c.decode.script.silent = True
        async with stopping(c, client, "--decode-limit", "1") as proxy:
            url = f"http://{proxy.address}"
            bodies = ("/v1/completions", "/v1/completions", "/tokenize")
            requests = [asyncio.create_task(post(c.session, url + path, {"prompt": "x"})) for path in bodies]
            waiting = proxy.router.decode
            await until(lambda: waiting.waiting == 1 and c.decode.counts["tokenize"] == 1, "all are under way")
        for reply in await asyncio.gather(*requests):
            assert reply.status == 503
            assert reply.headers["Retry-After"]
            assert "stopping" in reply.json()["error"]["message"]


async def stalled_client(c: Chain, proxy: RunningProxy) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client that has stopped to read for so long that Decode cannot write any more."""
    c.decode.script.chunks, c.decode.script.unpaced = 400_000, True
    host, port = proxy.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    body = b'{"prompt": "xxxxxxxxxxxxxxxxxxxx", "stream": true}'
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    last = -1
    while c.decode.counts["chunks"] != last or last == 0:
        last = c.decode.counts["chunks"]
        await asyncio.sleep(0.3)
    return reader, writer


@pytest.mark.parametrize("reads_again", [False, True])
async def test_a_client_that_does_not_read_gets_the_error_event_if_it_reads_again_in_time(
    meta: str, reads_again: bool
) -> None:
    async with chain(meta) as c, MetaClient(meta) as client, AsyncExitStack() as stack:
        config = make_config(meta, [c.prefill.address], [c.decode.address], "--recompute", "off")
        proxy = await stack.enter_async_context(service.running(config, client))
        reader, writer = await stalled_client(c, proxy)
        began = time.monotonic()
        stop = asyncio.create_task(stack.aclose())
        await until(lambda: proxy.router.drain.over, "the drain time is over")
        received = await reader.read() if reads_again else b""
        await stop
        assert time.monotonic() - began < DRAIN_S + (1 if reads_again else 5)
        record = proxy.journal.recent[0]
        assert record.life.phase is (Phase.FAILED if reads_again else Phase.ABORTED)
        assert "stopping" in record.reason
        assert (b"the proxy is stopping" in received[-1000:]) is reads_again
        writer.close()


async def test_what_ends_within_the_drain_time_ends_well(meta: str) -> None:
    async with chain(meta) as c, MetaClient(meta) as client:
        c.decode.script.delay_s = DRAIN_S / 8
        config = make_config(meta, [c.prefill.address], [c.decode.address])
        async with service.running(config, client) as proxy:
            url = f"http://{proxy.address}/v1/completions"
            request = asyncio.create_task(post(c.session, url, {"prompt": "x", "stream": True}))
            await until(lambda: c.decode.active == 1, "Decode has the request")
        assert (await request).events[-1] == "[DONE]"
        assert proxy.journal.outcomes == {Phase.DONE: 1}


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
