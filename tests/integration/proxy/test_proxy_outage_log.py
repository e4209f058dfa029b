"""Operators read where the meta service is and why it does not answer; clients do not."""

from __future__ import annotations

import logging

import grpc
import pytest
from proxy_harness import chain, meta_address, start_meta, until
from rd2h_client.errors import MetaUnavailableError
from rd2h_proxy.meta_link import MetaLink


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "rd2h_proxy.meta_link"]


async def test_503s_of_an_outage_are_explained_once_in_the_log(meta: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rd2h_proxy")
    service = await start_meta()
    address = meta_address(service)
    try:
        async with chain(address, "--meta-outage-s", "0.3", "--retries", "0") as c:
            for outage in range(2):
                await service.kill()
                await until(lambda: not c.proxy.router.meta.connected, "the proxy notices")
                for _ in range(3):
                    reply = await c.post({"prompt": "x"})
                    assert reply.status == 503
                    assert b"meta service" in reply.body
                    assert address.encode() not in reply.body
                assert len(told(caplog)) == outage + 1
                assert f"meta service grpc://{address} away for 0.3 s: UNAVAILABLE: " in told(caplog)[-1]
                service = await start_meta(address)
                await until(lambda: c.proxy.router.meta.connected, "the service is back")
                assert (await c.post({"prompt": "x"})).status == 200
    finally:
        await service.kill()


async def test_a_conflict_that_cannot_be_explained_keeps_the_address_to_itself(
    meta: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with chain(meta) as c:
        link: MetaLink = c.proxy.router.meta

        async def lost(prefill_engine_id: str, decode_engine_id: str) -> None:
            raise MetaUnavailableError(grpc.StatusCode.UNAVAILABLE, f"ipv4:{meta}: Connection reset by peer")

        monkeypatch.setattr(link.api, "check_compatibility", lost)
        assert await link.explain_conflict("p0", "d0") == "p0 and d0: their layouts differ"
        assert any(meta in message for message in told(caplog))
