"""What the layer hot path costs: two processes, real ZeroMQ, 61 layers, the production Publisher and Puller.

    python -m benchmarks.hotpath [--json] [--quick] [--unbound]

Cases: a = 1 request x 32 contiguous blocks, b = 1 x 512 random, c = 16 x 32 random. Engines: ``null`` moves nothing and
shows the overhead alone, ``host`` moves real bytes (checked after each row). Serial: the next layer goes out after the
acknowledgement; pipelined: all layers go out at once.

How it is measured:

* An acknowledgement takes from the call of ``publish`` on Prefill's forward thread until the publisher has handled
  the acknowledgement and opened the gate. The first layer of a chunk, at which its block lists are parsed and planned,
  does not count. In serial mode the forward thread then returns from ``wait_writable`` and publishes the next layer.
* With ``null`` the threads of either side are bound to one processor each, the first and the last that this process may
  use, by the connector's own setting (``data_path_cpus``), and so are the bare pair's: as an engine whose device does
  the reading is best deployed. Copying by ``host`` needs processors, so there nothing is bound. ``--unbound`` binds
  nothing anywhere.
* Every chunk has other blocks than the one before, so bytes come from memory rather than from a cache.
* CPU is that of the whole process: all product threads, ZeroMQ's I/O thread, and on Prefill the forward thread that
  calls the publisher. Decode's harness thread is blocked meanwhile; Prefill's adds two clock readings a layer. In
  serial mode it covers the layers after the first, in pipelined mode all of them.
* ``bare_rtt_p50_us`` is taken between the chunks of each row, with the same payload sizes, by two processes of their
  own; ``engine_alone_chunk_p50_ms`` likewise, in the Decode process. What else the machine does meets all alike.
* Idle CPU is that of the whole process with a live connection and its heartbeats, over several seconds.
"""

import argparse
import json
import os
import secrets
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, cast

from benchmarks.harness.bare import BarePair, serve_dealer, serve_router
from benchmarks.harness.cases import CASES, LAYERS, Case
from benchmarks.harness.clocks import describe_machine, process_cpu_s
from benchmarks.harness.decode import serve_decode
from benchmarks.harness.prefill import PIPELINED, SERIAL, ChunkTimes, Target, payload_bytes, serve_prefill
from benchmarks.harness.processes import Child

ENGINES = ("null", "host")
MODES = (SERIAL, PIPELINED)


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    null_chunks: int
    host_chunks: int
    bare_round_trips: int
    idle_s: float


FULL = Effort(null_chunks=30, host_chunks=10, bare_round_trips=1500, idle_s=5.0)
QUICK = Effort(null_chunks=5, host_chunks=2, bare_round_trips=200, idle_s=1.0)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the result; the fields are the contract of ``--json``."""

    case: str
    engine: str
    mode: str
    ack_p50_us: float
    ack_p99_us: float
    chunk_p50_ms: float
    p_cpu_us_per_layer: float
    d_cpu_us_per_layer: float
    engine_alone_chunk_p50_ms: float
    bytes_per_s: float
    messages: int
    bare_rtt_p50_us: float


@dataclass(slots=True)
class Bench:
    """The four processes and what Prefill and Decode said about themselves."""

    prefill: Child
    decode: Child
    bare: BarePair
    effort: Effort
    target: Target
    session: str
    source: object

    def row(self, case: Case, engine: str, mode: str) -> Row:
        """Measure one row."""
        message_bytes, reply_bytes = payload_bytes(case)
        chunks = self.effort.null_chunks if engine == "null" else self.effort.host_chunks
        self._chunk(case, -1, mode)  # warm
        alone: list[float] = []
        bare: list[float] = []
        runs = []
        for turn in range(chunks):
            runs.append(self._chunk(case, turn, mode))
            alone.append(cast(float, self.decode.ask("engine_alone", case, turn, self.session, self.source)))
            bare += self.bare.round_trips_s(self.effort.bare_round_trips // chunks, message_bytes, reply_bytes)
        times = [run for run, _ in runs]
        if engine != "null" and (wrong := self._wrong_blocks(case, mode)):
            raise RuntimeError(f"case {case.name}: {wrong} blocks do not hold what Prefill published")
        acks = sorted(ack for run in times for ack in run.acks)
        layers = sum(run.cpu_layers for run in times)
        nbytes = sum(int(counters.get("bytes_read", 0)) for _, counters in runs)
        return Row(
            case.name,
            engine,
            mode,
            ack_p50_us=_us(statistics.median(acks)),
            ack_p99_us=_us(acks[int(len(acks) * 0.99)]),
            chunk_p50_ms=round(statistics.median(run.chunk for run in times) * 1e3, 3),
            p_cpu_us_per_layer=_us(sum(run.p_cpu for run in times) / layers),
            d_cpu_us_per_layer=_us(sum(run.d_cpu for run in times) / layers),
            engine_alone_chunk_p50_ms=round(statistics.median(alone) * 1e3, 3),
            bytes_per_s=round(nbytes / sum(run.chunk for run in times)) if engine != "null" else 0,
            messages=len(times) * LAYERS,
            bare_rtt_p50_us=_us(statistics.median(bare)),
        )

    def _wrong_blocks(self, case: Case, mode: str) -> int:
        """Pull one more chunk into wiped memory; returns how many blocks do not hold Prefill's bytes."""
        self.decode.ask("wipe")
        self._chunk(case, 0, mode)
        return cast(int, self.decode.ask("wrong_blocks", case, 0))

    def _chunk(self, case: Case, turn: int, mode: str) -> tuple[ChunkTimes, dict[str, float]]:
        tokens = [secrets.token_bytes(16) for _ in range(case.requests)]
        self.decode.ask("add", case, turn, tokens)
        times = cast(ChunkTimes, self.prefill.ask("chunk", case, turn, mode, self.target, tokens))
        return times, cast("dict[str, float]", self.decode.ask("finish", case.requests))

    def idle_percent(self) -> dict[str, float]:
        """CPU of both processes while nothing is published."""
        time.sleep(0.2)
        pids = {"p": self.prefill.pid, "d": self.decode.pid}
        before = {side: process_cpu_s(pid) for side, pid in pids.items()}
        begin = time.perf_counter()
        time.sleep(self.effort.idle_s)
        seconds = time.perf_counter() - begin
        return {side: round((process_cpu_s(pid) - before[side]) / seconds * 100, 3) for side, pid in pids.items()}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def own_cpus() -> tuple[frozenset[int], frozenset[int]]:
    """A processor for either side; none of its own where there is only one."""
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        return frozenset(), frozenset()
    return frozenset(usable[:1]), frozenset(usable[-1:])


def measure(effort: Effort, engines: Sequence[str], cases: Sequence[Case], bound: bool = True) -> dict[str, Any]:
    """The whole result object."""
    rows: list[Row] = []
    idle: dict[str, float] = {}
    with ExitStack() as stack:
        prefill = stack.enter_context(Child(serve_prefill))
        decode = stack.enter_context(Child(serve_decode))
        for engine in engines:
            cpus = own_cpus() if bound and engine == "null" else (frozenset[int](), frozenset[int]())
            router, dealer = stack.enter_context(Child(serve_router)), stack.enter_context(Child(serve_dealer))
            bare = BarePair(router.pipe, dealer.pipe, cpus)
            generation, session, source = cast("tuple[int, str, object]", prefill.ask("start", engine, cpus[0]))
            port, decode_generation = cast("tuple[int, int]", decode.ask("start", engine, generation, cpus[1]))
            target = Target(port, decode_generation, decode.pid)
            bench = Bench(prefill, decode, bare, effort, target, session, source)
            for case in cases:
                for mode in MODES:
                    rows.append(bench.row(case, engine, mode))
                    _progress(rows[-1])
            idle = idle or bench.idle_percent()
            prefill.ask("stop")
            decode.ask("stop")
    return {"machine": describe_machine(), "rows": [asdict(row) for row in rows], "idle_cpu_percent": idle}


def _progress(row: Row) -> None:
    print(
        f"{row.case} {row.engine:4} {row.mode:9} ack p50 {row.ack_p50_us:8.0f} us = "
        f"{row.ack_p50_us / row.bare_rtt_p50_us:5.2f} x bare {row.bare_rtt_p50_us:4.0f} us, "
        f"p99 {row.ack_p99_us:8.0f} us; "
        f"chunk {row.chunk_p50_ms:8.2f} ms, engine alone {row.engine_alone_chunk_p50_ms:8.2f} ms; "
        f"CPU a layer: P {row.p_cpu_us_per_layer:4.0f} us, D {row.d_cpu_us_per_layer:4.0f} us; "
        f"{row.bytes_per_s / 1e9:.2f} GB/s",
        file=sys.stderr,
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions: a smoke run, not a measurement")
    parser.add_argument("--unbound", action="store_true", help="bind no thread to a processor")
    parser.add_argument("--engine", choices=ENGINES, action="append", help="only this engine (repeatable)")
    parser.add_argument("--case", choices=[case.name for case in CASES], action="append", help="only this case")
    options = parser.parse_args(arguments)
    cases = [case for case in CASES if options.case is None or case.name in options.case]
    effort = QUICK if options.quick else FULL
    result = measure(effort, options.engine or ENGINES, cases, bound=not options.unbound)
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        print(f"idle CPU: {result['idle_cpu_percent']} percent; machine: {result['machine']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
