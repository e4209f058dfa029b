"""The HTTP application: routes, and what they share."""

from __future__ import annotations

import asyncio
import logging
import time

import aiohttp
from aiohttp import web

from rd2h_proxy.client_body import read_body
from rd2h_proxy.completions import CompletionHandler
from rd2h_proxy.engine_http import AnswerTooLargeError, leg_headers, read_bounded
from rd2h_proxy.errors import ErrorAnswer
from rd2h_proxy.journal import Journal
from rd2h_proxy.metrics import CONTENT_TYPE as METRICS_TYPE
from rd2h_proxy.metrics import ProxyMetrics
from rd2h_proxy.middleware import errors_as_json, known_to, written_in_time
from rd2h_proxy.pool import EnginePool
from rd2h_proxy.relay import error_response
from rd2h_proxy.router import Router
from rd2h_proxy.stall import StallGuard
from rd2h_proxy.status_page import StatusPage
from rd2h_proxy.target import Target

log = logging.getLogger(__name__)

_PASS_TIMEOUT_S = 30.0
_MAX_PASS_BYTES = 16 << 20
# The page shows what clients and engines sent, escaped; should that ever fail, nothing of it may run.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "Cache-Control": "no-store",
}


class Operations:
    """Everything that does not generate text."""

    def __init__(self, router: Router, body_limit_s: float) -> None:
        self._router = router
        self._body_limit_s = body_limit_s

    async def health(self, _http: web.Request) -> web.StreamResponse:
        """GET /health: 200 when a request would be served now, else 503; no body, as vLLM's."""
        return web.Response(status=200 if self._report()["status"] == "ok" else 503)

    async def healthcheck(self, _http: web.Request) -> web.StreamResponse:
        """GET /healthcheck: the same with the reasons."""
        report = self._report()
        return web.json_response(report, status=200 if report["status"] == "ok" else 503)

    def _report(self) -> dict[str, object]:
        router = self._router
        engines = {
            role: _engine_reports(pool) for role, pool in (("prefill", router.prefill), ("decode", router.decode))
        }
        return {
            "status": "ok" if router.serving else "unavailable",
            "meta_service_connected": router.meta.connected,
            "prefill_instances": len(router.prefill.usable()),
            "decode_instances": len(router.decode.usable()),
            "held": {
                "body_bytes": {"used": router.bodies.used, "limit": router.bodies.limit},
                "passing": {"used": router.passing.used, "limit": router.passing.limit},
            },
            "engines": engines,
        }

    async def to_decode(self, http: web.Request) -> web.StreamResponse:
        """Passes a small request that any Decode engine can answer, as it is.

        Raises:
            ProxyError: the body cannot be had, or too many such requests are under way.
        """
        body = bytes(await read_body(http, self._body_limit_s, self._router.bodies))
        # Not before: clients that send slowly would keep the places.
        self._router.passing.holding(http).add(1)
        for target in sorted(self._router.decode.usable(), key=lambda target: target.in_flight):
            try:
                status, content_type, answer = await self._ask(target, http.method, http.path_qs, body, http)
            except (aiohttp.ClientError, TimeoutError, OSError, AnswerTooLargeError) as error:
                log.warning("%s %s on %s failed: %s", http.method, http.path, target.address, error)
                continue
            return web.Response(status=status, body=answer, headers={"Content-Type": content_type})
        reason = f"no Decode engine answers ({self._router.decode.describe_unusable()})"
        return error_response(ErrorAnswer.make(503, reason, 2), "-")

    async def _ask(
        self, target: Target, method: str, path: str, body: bytes, http: web.Request
    ) -> tuple[int, str, bytes]:
        timeout = aiohttp.ClientTimeout(total=_PASS_TIMEOUT_S)
        headers = leg_headers(http.headers, http.headers.get("X-Request-Id", "proxy"))
        async with self._router.session.request(
            method, target.url + path, data=body or None, headers=headers, timeout=timeout, allow_redirects=False
        ) as response:
            answer = await read_bounded(response, _MAX_PASS_BYTES)
            return response.status, response.headers.get("Content-Type", "application/json"), answer

    async def reset_prefix_cache(self, http: web.Request) -> web.StreamResponse:
        """POST /reset_prefix_cache: told to every engine; 200 only when all did it."""
        targets = [*self._router.prefill.targets, *self._router.decode.targets]
        results = await asyncio.gather(*(self._reset(target, http) for target in targets))
        report = {
            f"{target.role.value} {target.address}": result for target, result in zip(targets, results, strict=True)
        }
        return web.json_response(report, status=200 if all(result == "ok" for result in results) else 502)

    async def _reset(self, target: Target, http: web.Request) -> str:
        try:
            status, _, _ = await self._ask(target, "POST", http.path_qs, b"", http)
        except (aiohttp.ClientError, TimeoutError, OSError, AnswerTooLargeError) as error:
            return str(error) or type(error).__name__
        return "ok" if status == 200 else f"status {status}"


def _engine_reports(pool: EnginePool) -> list[dict[str, object]]:
    now = time.monotonic()
    return [
        {
            "address": target.address,
            "usable": (reason := target.unusable_reason(now)) is None,
            "reason": reason or "",
            "breaker": target.breaker.state.value,
            "in_flight": target.in_flight,
            "work_tokens": target.work_tokens,
            "engines": sorted(target.engines),
        }
        for target in pool.targets
    ]


def make_app(
    router: Router, completions: CompletionHandler, journal: Journal, guard: StallGuard, max_body_bytes: int
) -> web.Application:
    """The routes. Anything else is 404."""
    operations = Operations(router, guard.limit_s)
    metrics, page = ProxyMetrics(router, journal), StatusPage(router, journal)

    async def show_metrics(_http: web.Request) -> web.StreamResponse:
        return web.Response(body=metrics.render().encode(), headers={"Content-Type": METRICS_TYPE})

    async def show_page(_http: web.Request) -> web.StreamResponse:
        return web.Response(text=page.render(), content_type="text/html", headers=_PAGE_HEADERS)

    drain = router.drain
    middlewares = [known_to(drain), written_in_time(guard), errors_as_json(drain)]
    app = web.Application(client_max_size=max_body_bytes, middlewares=middlewares)
    app.add_routes(
        [
            web.post("/v1/completions", completions.complete),
            web.post("/v1/chat/completions", completions.chat),
            web.get("/v1/models", operations.to_decode),
            web.post("/tokenize", operations.to_decode),
            web.post("/detokenize", operations.to_decode),
            web.post("/reset_prefix_cache", operations.reset_prefix_cache),
            web.get("/health", operations.health),
            web.get("/healthcheck", operations.healthcheck),
            web.get("/metrics", show_metrics),
            web.get("/", show_page),
        ]
    )
    return app
