"""Benchmark of the proxy: `python -m benchmarks.proxy --json`.

Latency: chunks carry the time at which the engine wrote them; measured are the direct way, a bare pass-through of the
same HTTP stack, and the proxy, taking turns in one run. "added" is the median over that of the direct way.
Streams: many at a time through one proxy process, with its memory. Choice: see proxy_parts/choice.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.proxy_parts.choice import compare
from benchmarks.proxy_parts.load import Load

_ROUNDS = 5


class Part:
    """A process that prints a ready line."""

    def __init__(self, stack: ExitStack, *command: str) -> None:
        self.process = stack.enter_context(
            subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True)
        )
        stack.callback(self.process.kill)
        self.line = self.process.stdout.readline().strip() if self.process.stdout else ""
        if not self.line:
            raise RuntimeError(f"{' '.join(command)} did not start")

    @property
    def rss_bytes(self) -> int:
        """Resident memory."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    @property
    def cpu_s(self) -> float:
        """Processor time used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass
class Chain:
    """Everything that runs."""

    direct: int
    bare: int
    proxy: int
    tracking: int
    """A second proxy that keeps token ids (`--recompute on`)."""
    process: Part


def start(stack: ExitStack) -> Chain:
    """Starts all processes."""
    meta = Part(stack, "rd2h_meta.cli", "serve", "--listen", "127.0.0.1:0", "--log-level", "warning")
    address = meta.line.split("serving on ")[1]
    engine = Part(stack, "benchmarks.proxy_parts.engine", address)
    _, prefill, decode = engine.line.split()
    bare = Part(stack, "benchmarks.proxy_parts.passthrough", f"http://127.0.0.1:{decode}")
    flags = ["--port", "0", "--meta-service", f"grpc://{address}", "--log-level", "warning", "--discover"]
    flags += ["--prefiller-hosts", "127.0.0.1", "--prefiller-ports", prefill]
    flags += ["--decoder-hosts", "127.0.0.1", "--decoder-ports", decode]
    proxy = Part(stack, "rd2h_proxy", *flags)
    tracking = Part(stack, "rd2h_proxy", *flags, "--recompute", "on")
    # The engine's registration tells that its kind never gives requests back; wait until it is known.
    time.sleep(1.0)
    return Chain(int(decode), int(bare.line.split()[1]), _port(proxy), _port(tracking), proxy)


def _port(proxy: Part) -> int:
    return int(proxy.line.rsplit(":", 1)[1])


async def latency_rows(chain: Chain, streams: int, chunks: int, pace_ms: float) -> list[dict[str, Any]]:
    """Rows `direct`, `bare`, `proxy` and `proxy_keeping_token_ids`, medians over rounds in turn."""
    ports = {
        "direct": chain.direct,
        "bare": chain.bare,
        "proxy": chain.proxy,
        "proxy_keeping_token_ids": chain.tracking,
    }
    rounds: dict[str, list[Load]] = {name: [] for name in ports}
    for number in range(_ROUNDS + 1):
        for name, port in ports.items():
            load = Load(port, streams, chunks, pace_ms)
            await load.run()
            if load.errors:
                raise RuntimeError(f"{name}: {load.errors[0]}")
            if number:  # the first round warms up
                rounds[name].append(load)
    p50 = {name: statistics.median(load.p50_us for load in loads) for name, loads in rounds.items()}
    bare_added = p50["bare"] - p50["direct"]
    return [
        {
            "case": "latency",
            "way": name,
            "streams": streams,
            "chunks_per_s": round(streams * 1000 / pace_ms),
            "p50_us": round(p50[name], 1),
            "p99_us": round(statistics.median(load.p99_us for load in loads), 1),
            "added_p50_us": round(p50[name] - p50["direct"], 1),
            "added_over_bare": round((p50[name] - p50["direct"]) / bare_added, 3) if name != "direct" else None,
        }
        for name, loads in rounds.items()
    ]


async def streams_row(chain: Chain, streams: int, chunks: int, pace_ms: float) -> dict[str, Any]:
    """Many streams at a time through the proxy."""
    idle_bytes, cpu_before, began = chain.process.rss_bytes, chain.process.cpu_s, time.monotonic()
    load = Load(chain.proxy, streams, chunks, pace_ms)
    running = asyncio.create_task(load.run())
    begun = asyncio.create_task(load.all_begun.wait())
    await asyncio.wait({running, begun}, return_when=asyncio.FIRST_COMPLETED)
    busy_bytes = chain.process.rss_bytes
    await running
    begun.cancel()
    return {
        "case": "streams",
        "streams": streams,
        "chunks_each": chunks,
        "finished": load.finished,
        "errors": load.errors[:3],
        "all_open_at_once": load.all_begun.is_set(),
        "seconds": round(time.monotonic() - began, 1),
        "proxy_cpu_us_per_chunk": round((chain.process.cpu_s - cpu_before) * 1e6 / (streams * chunks), 1),
        "memory_bytes_per_stream": round((busy_bytes - idle_bytes) / streams),
        "memory_idle_bytes": idle_bytes,
        "p50_us": round(load.p50_us, 1),
        "p99_us": round(load.p99_us, 1),
    }


def choice_rows(count: int) -> list[dict[str, Any]]:
    """Rows of the simulation."""
    return [{"case": "choice", "way": name, "arrivals": count, **asdict(row)} for name, row in compare(count).items()]


async def measure(quick: bool) -> list[dict[str, Any]]:
    """All rows."""
    with ExitStack() as stack:
        chain = start(stack)
        rows = await latency_rows(chain, streams=32, chunks=30 if quick else 60, pace_ms=50.0)
        many, chunks, pace_ms = (200, 50, 100.0) if quick else (1500, 200, 500.0)
        rows.append(await streams_row(chain, many, chunks, pace_ms))
    return rows + choice_rows(10_000)


def main() -> int:
    """Runs the benchmark and prints it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.proxy", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter streams")
    args = parser.parse_args()
    rows = asyncio.run(measure(args.quick))
    machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "kernel": platform.release()}
    if args.json:
        print(json.dumps({"machine": machine, "rows": rows}))
    else:
        for row in rows:
            print("  ".join(f"{key}={value}" for key, value in row.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
