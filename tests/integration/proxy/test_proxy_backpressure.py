"""Clients that read slowly or not at all hold neither memory nor engines."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

from proxy_harness import Chain, chain, until


async def open_stream(c: Chain) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client that has sent its request; its buffers are as small as they get."""
    host, port = c.proxy.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    body = json.dumps({"prompt": "x" * 20, "stream": True}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    return reader, writer


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def stalled(c: Chain) -> int:
    """Waits until Decode cannot write any more, and returns how many chunks it got rid of."""
    last = -1
    while c.decode.counts["chunks"] != last or last == 0:
        last = c.decode.counts["chunks"]
        await asyncio.sleep(0.3)
    return last


async def test_a_client_that_does_not_read_stops_decode_and_takes_no_memory(meta: str) -> None:
    async with chain(meta, "--recompute", "off") as c:
        c.decode.script.chunks = 400_000
        c.decode.script.unpaced = True
        reader, writer = await open_stream(c)
        sent = await stalled(c)
        assert sent < 200_000, "the chunks went somewhere"
        before = rss_bytes()
        await asyncio.sleep(1.0)
        assert rss_bytes() - before < 4 << 20
        # It reads on, and gets more.
        for _ in range(2000):
            await reader.read(1024)
        await until(lambda: c.decode.counts["chunks"] > sent, "Decode goes on")
        writer.close()
        await c.settled()


async def test_a_client_that_never_reads_is_cut_off(meta: str) -> None:
    async with chain(meta, "--recompute", "off", "--client-stall-s", "1") as c:
        c.decode.script.chunks = 400_000
        c.decode.script.unpaced = True
        _, writer = await open_stream(c)
        await until(lambda: c.decode.counts["chunks"] > 0, "the stream has begun")
        await c.settled()
        writer.close()
