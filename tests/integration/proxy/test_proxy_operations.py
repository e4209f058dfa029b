"""What operators see: metrics and the status page."""

from __future__ import annotations

import asyncio
import html.parser
import json
import re
from pathlib import Path

from proxy_harness import Chain, chain, until

DEPLOY = Path(__file__).resolve().parents[3] / "clients" / "deploy"


async def metrics_of(c: Chain) -> dict[str, float]:
    async with c.session.get(c.url + "/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = await response.text()
    samples = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            match = re.fullmatch(r'([a-z0-9_]+(?:\{[a-z]+="[^"]*"(?:,[a-z]+="[^"]*")*\})?) ([0-9.]+)', line)
            assert match, line
            samples[match[1]] = float(match[2])
    return samples


async def test_metrics_follow_requests(meta: str) -> None:
    async with chain(meta, "--retries", "1", prefills=2) as c:
        assert (await c.post({"prompt": "x", "stream": True})).status == 200
        c.prefills[0].script.status = c.prefills[1].script.status = 500
        assert (await c.post({"prompt": "x"})).status == 500
        await c.settled()
        m = await metrics_of(c)
        path = "/v1/completions"
        assert m[f'rd2h_proxy_requests_total{{path="{path}",outcome="done",status="200"}}'] == 1
        assert m[f'rd2h_proxy_requests_total{{path="{path}",outcome="failed",status="500"}}'] == 1
        assert m["rd2h_proxy_retries_total"] == 1
        assert m["rd2h_proxy_in_flight"] == 0
        assert m["rd2h_proxy_first_byte_seconds_count"] == 1
        assert m['rd2h_proxy_phase_seconds_count{phase="rendezvous"}'] == 3
        assert m['rd2h_proxy_phase_seconds_bucket{phase="streaming",le="+Inf"}'] == 1
        assert m["rd2h_proxy_meta_service_connected"] == 1
        decode = f'role="decode",address="{c.decode.address}"'
        assert m[f"rd2h_proxy_engine_usable{{{decode}}}"] == 1
        assert m[f"rd2h_proxy_engine_in_flight{{{decode}}}"] == 0


class Page(html.parser.HTMLParser):
    """Text of the tables by id, and a check that every tag is closed."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tables: dict[str, str] = {}
        self.open: list[str] = []
        self._table = ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)
        if tag == "table":
            self._table = dict(attrs)["id"] or ""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.tables[self._table] = self.tables.get(self._table, "") + data + " "


async def test_status_page_shows_engines_and_requests(meta: str) -> None:
    async with chain(meta) as c:
        c.prefill.script.status, c.prefill.script.body = 422, '{"error": {"message": "<script>alert(1)</script>"}}'
        await c.post({"prompt": "x"})
        c.prefill.script.status, c.prefill.gate = 200, asyncio.Event()
        request = asyncio.create_task(c.post({"prompt": "x"}, headers={"X-Request-Id": "<b>mine"}))
        await until(lambda: c.prefill.active == 1, "the request is on Prefill")
        async with c.session.get(c.url + "/") as response:
            assert "default-src 'none'" in response.headers["Content-Security-Policy"]
            source = await response.text()
        page = Page(source)
        assert page.open == []
        assert c.prefill.address in page.tables["prefill"]
        assert "1 / 2048" in page.tables["decode"]
        assert "-b-mine" in page.tables["running"]
        assert "prefill" in page.tables["running"]
        assert "422" in page.tables["recent"]
        assert "<script" not in source
        c.prefill.gate.set()
        assert (await request).status == 200


async def test_the_dashboard_shows_exactly_the_metrics_that_exist(meta: str) -> None:
    async with chain(meta) as c, c.session.get(c.url + "/metrics") as response:
        known = set(re.findall(r"^# TYPE (\S+)", await response.text(), re.MULTILINE))
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    names = {name for expression in expressions for name in re.findall(r"rd2h_proxy_\w+", expression)}
    used = {name if name in known else re.sub(r"_(bucket|sum|count)$", "", name) for name in names}
    assert used <= known
    assert known - used == {"rd2h_proxy_background_tasks"}
