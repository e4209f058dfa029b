"""What runs beside the requests."""

import asyncio
import logging
from contextlib import AsyncExitStack

import pytest
from rd2h_proxy import service


async def test_work_beside_the_requests_that_breaks_is_seen(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)

    async def breaks() -> None:
        raise LookupError("nobody expected this")

    async with AsyncExitStack() as stack:
        service._run_beside(stack, breaks(), "prober")
        async with asyncio.timeout(5):
            while "prober" not in caplog.text:
                await asyncio.sleep(0)
    assert "nobody expected this" in caplog.text


async def test_work_that_is_ended_in_time_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with AsyncExitStack() as stack:
        service._run_beside(stack, asyncio.sleep(3600), "prober")
        await asyncio.sleep(0)
    assert not caplog.text
