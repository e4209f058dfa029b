"""The status page in headless Chromium, driven over its debugging protocol."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from proxy_harness import chain, until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


@dataclass
class Tab:
    """One page of the browser."""

    socket: aiohttp.ClientWebSocketResponse
    problems: list[str] = field(default_factory=list)
    loads: int = 0
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _answers: dict[int, asyncio.Future[Any]] = field(default_factory=dict)

    async def listen(self) -> None:
        async for message in self.socket:
            event = json.loads(message.data)
            if "id" in event:
                self._answers.pop(event["id"]).set_result(event.get("result", event.get("error")))
            elif event["method"] == "Page.loadEventFired":
                self.loads += 1
            elif event["method"] == "Log.entryAdded" and "favicon" not in event["params"]["entry"].get("url", ""):
                self.problems.append(event["params"]["entry"]["text"])
            elif event["method"] == "Runtime.exceptionThrown":
                self.problems.append(json.dumps(event["params"]))

    async def call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self.socket.send_json({"id": number, "method": method, "params": params})
        return await asyncio.wait_for(answer, 20)

    async def value(self, expression: str) -> Any:
        result = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return result["result"].get("value")


@asynccontextmanager
async def browser(profile: Path) -> AsyncIterator[Tab]:
    assert CHROMIUM is not None
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
    flags += ["--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
    process = await asyncio.create_subprocess_exec(
        CHROMIUM, *flags, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        port_file = profile / "DevToolsActivePort"
        await until(lambda: port_file.exists() and "\n" in port_file.read_text(), "the browser listens")
        base = f"http://127.0.0.1:{port_file.read_text().splitlines()[0]}"
        async with aiohttp.ClientSession() as session:
            async with session.get(base + "/json/list") as response:
                pages = [page for page in await response.json() if page["type"] == "page"]
            async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                tab = Tab(socket)
                listening = asyncio.create_task(tab.listen())
                for domain in ("Page", "Runtime", "Log"):
                    await tab.call(f"{domain}.enable")
                yield tab
                listening.cancel()
    finally:
        process.terminate()
        await process.wait()


async def test_the_page_shows_what_happens_and_renews_itself(meta: str, tmp_path: Path) -> None:
    async with chain(meta) as c, browser(tmp_path / "profile") as tab:
        assert (await c.post({"prompt": "x"})).status == 200
        c.prefill.script.status, c.prefill.script.body = 422, '{"error": {"message": "<img src=x onerror=alert(1)>"}}'
        assert (await c.post({"prompt": "x"})).status == 422
        await tab.call("Page.navigate", url=c.url + "/")
        await until(lambda: tab.loads == 1, "the page is loaded")
        assert await tab.value("document.title") == "rd2h proxy"
        assert "serving" in await tab.value("document.getElementById('status').innerText")
        assert c.decode.address in await tab.value("document.getElementById('decode').innerText")
        assert await tab.value("document.querySelectorAll('#recent tbody tr').length") == 2
        assert await tab.value("document.images.length + document.scripts.length") == 0

        colour = "getComputedStyle(document.querySelector('.{}')).color"
        assert await tab.value(colour.format("ok")) != await tab.value(colour.format("bad"))
        widths = "[...document.querySelectorAll('#recent .bar span')].map(s => s.getBoundingClientRect().width)"
        assert all(width > 0 for width in await tab.value(widths))
        for width in (1280, 400):
            await tab.call(
                "Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False
            )
            assert await tab.value("document.documentElement.scrollWidth <= innerWidth"), width

        c.prefill.script.status, c.prefill.gate = 200, asyncio.Event()
        request = asyncio.create_task(c.post({"prompt": "x"}))
        await until(lambda: c.prefill.active == 1, "a request is on Prefill")
        loads = tab.loads
        await until(lambda: tab.loads > loads, "the page renews itself", 60)
        assert await tab.value("document.getElementById('in-flight').innerText") == "1"
        c.prefill.gate.set()
        await request
        assert tab.problems == []
