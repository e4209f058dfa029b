"""An HTTP meta server of the usual kind, and clients of it as engines use them.

FastAPI on uvicorn; the proxy lives in the same process. One POST per advert; the handler hands the advert to the
waiter and holds the request until the waiter has dispatched. The engine's side posts from up to 32 threads, either with
a new HTTP client for every call or with one kept-alive client. Latency is that of the POST: from advertising to the
answer that follows the dispatch.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from threading import Lock

import fastapi
import httpx
import uvicorn

from benchmarks.controlplane_parts.payload import as_json
from benchmarks.controlplane_parts.samples import Samples

THREADS = 32
TIMEOUT_S = 60.0


def make_app() -> fastapi.FastAPI:
    """The meta server with its waiters."""
    app = fastapi.FastAPI()
    adverts: dict[str, asyncio.Future[dict[str, object]]] = {}

    async def wait_and_dispatch(rendezvous_id: str, dispatched: asyncio.Event) -> None:
        """The proxy's side: it waits for the advert, then dispatches (which costs nothing here)."""
        await adverts[rendezvous_id]
        dispatched.set()

    @app.post("/v1/metaserver")
    async def advertise(advert: dict[str, object]) -> dict[str, str]:
        rendezvous_id = str(advert["rendezvous_id"])
        adverts[rendezvous_id] = asyncio.get_running_loop().create_future()
        dispatched = asyncio.Event()
        waiter = asyncio.create_task(wait_and_dispatch(rendezvous_id, dispatched))
        adverts[rendezvous_id].set_result(advert)
        await dispatched.wait()
        await waiter
        del adverts[rendezvous_id]
        return {"status": "dispatched"}

    return app


def serve(pipe: Connection) -> None:
    """Run the server until the pipe says None."""
    asyncio.run(_serve(pipe))


async def _serve(pipe: Connection) -> None:
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    server = uvicorn.Server(uvicorn.Config(make_app(), host="127.0.0.1", port=0, log_level="warning", access_log=False))
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    pipe.send(f"http://127.0.0.1:{port}/v1/metaserver")
    await asyncio.to_thread(pipe.recv)
    server.should_exit = True
    await running


def measure(address: str, concurrency: int, duration_s: float, keep_alive: bool) -> Samples:
    """Post for `duration_s` from at most THREADS threads."""
    if not keep_alive:
        return _run(partial(_post_with_new_client, address), concurrency, duration_s)
    with httpx.Client(timeout=TIMEOUT_S, trust_env=False) as client:
        return _run(partial(_post, client, address), concurrency, duration_s)


def _post_with_new_client(address: str) -> None:
    with httpx.Client(timeout=TIMEOUT_S) as client:
        _post(client, address)


def _post(client: httpx.Client, address: str) -> None:
    client.post(address, json=as_json(secrets.token_hex(16))).raise_for_status()


def _run(post: Callable[[], None], concurrency: int, duration_s: float) -> Samples:
    samples, lock = Samples(), Lock()
    post()
    begin_s = time.perf_counter()
    until_s = begin_s + duration_s

    def worker() -> None:
        while time.perf_counter() < until_s:
            sent_s = time.perf_counter()
            post()
            took_s = time.perf_counter() - sent_s
            with lock:
                samples.latencies_s.append(took_s)

    threads = min(concurrency, THREADS)
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(worker) for _ in range(threads)]:
            done.result()
    samples.elapsed_s = time.perf_counter() - begin_s
    return samples
