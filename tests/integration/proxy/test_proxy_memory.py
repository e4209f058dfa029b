"""A request's body, with its pictures, is held once while the request runs and not at all when it is over."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from typing import Any

import pytest
from proxy_harness import chain, until
from rd2h_proxy.openai_request import OpenAiRequest

CHAT = "/v1/chat/completions"
MARK = "a picture of no other test "


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Circles of objects stay, so that a test sees them. A proxy collects them too, but perhaps megabytes later."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def requests_alive() -> int:
    return sum(type(thing) is OpenAiRequest for thing in gc.get_objects())


def bodies_alive() -> int:
    """Raw bodies cannot be found as such, so their owners' attributes are looked through."""
    found = 0
    for thing in gc.get_objects():
        # Lazy maps of libraries, which import modules when they are looked through, are no plain dictionaries.
        for value in thing.values() if type(thing) is dict else ():
            found += type(value) in (bytes, bytearray) and MARK.encode() in value
    return found


def body(**fields: Any) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + MARK * 1000}}
    return {"messages": [{"role": "user", "content": [part]}], **fields}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "how",
    [
        "done",
        "left",
        "left at prefill",
        "left at rendezvous",
        "decode 400",
        "decode 500",
        "prefill 500",
        "decode drops",
        "error event",
        "cut",
        "whole",
        "refused",
    ],
)
async def test_nothing_of_a_request_outlives_it(meta: str, how: str, stream: bool, no_collection: None) -> None:
    async with chain(meta) as c:
        c.decode.keep_bodies = c.prefill.keep_bodies = False
        d, p = c.decode.script, c.prefill.script
        d.status, p.status = {"decode 400": (400, 200), "decode 500": (500, 200), "prefill 500": (200, 500)}.get(
            how, (200, 200)
        )
        d.drop, d.error_event, d.fail_after = how == "decode drops", how == "error event", 2 if how == "cut" else None
        extra: dict[str, Any] = {"whole": {"prompt_logprobs": 1}, "refused": {"n": 0}}.get(how, {})
        for _ in range(2):
            if how.startswith("left"):
                d.chunks, d.delay_s, d.silent = 1000, 0.01, how == "left at rendezvous"
                c.prefill.gate = asyncio.Event() if how == "left at prefill" else None
                sent = c.prefill.counts["kv-200"]
                reached = {
                    "left": lambda sent=sent: c.prefill.counts["kv-200"] > sent,
                    "left at prefill": lambda: c.prefill.active == 1,
                    "left at rendezvous": lambda: c.decode.active == 1,
                }[how]
                task = asyncio.create_task(c.post(body(stream=stream), CHAT))
                await until(reached, how)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await c.settled()
            else:
                await c.post(body(stream=stream, **extra), CHAT)
        await c.settled()
        await until(lambda: requests_alive() == 0, "every request is gone", 2)


async def test_a_running_request_holds_its_text_once(meta: str) -> None:
    async with chain(meta) as c:
        c.decode.keep_bodies = c.prefill.keep_bodies = False
        c.decode.script.chunks, c.decode.script.delay_s = 1000, 0.01
        async with c.session.post(c.url + CHAT, json=body(stream=True)) as response:
            await response.content.readany()
            assert requests_alive() == 1
            # Parsed by then; neither what came from the client nor what went to the engines is needed again.
            await until(lambda: bodies_alive() == 0, "no body as text is left in the proxy", 5)
        await c.settled()
