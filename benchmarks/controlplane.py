"""What a rendezvous costs: advertise -> waiter notified, and rendezvous a second.

    python -m benchmarks.controlplane [--json] [--quick]

Systems, all with the same advert, the server in a process of its own and the clients in this one:

* ``ours``: the production service and client; adverts and notifications travel in batched streams.
* ``a``: a bare grpc.aio unary echo of the same bytes.
* ``b``: an HTTP meta server (FastAPI, uvicorn): one POST per advert, held until dispatch, a new client per call, at
  most 32 threads.
* ``c``: the same with one kept-alive client.
* the floor: a bare bidirectional grpc.aio stream that echoes the same adverts, whatever is pending in one message. No
  service on a stream can be faster, so it tells how much of a distance to a target is ours.

Rounds alternate between the systems, so that a disturbance of the machine hits all of them; a row is the round with the
median rate. Target: p50 of ours at most half of (a) at concurrency 1; at least 8 times the rate of (a) and 50 times
that of (c) at concurrency 32 and 256. ``--json`` has the floor under a key of its own. With ``--quick`` nothing is said
about the targets (``--json`` has an empty list of them): one short round is too rough for a verdict.
"""

import argparse
import gc
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection

from benchmarks.controlplane_parts import echo, http_meta, ours
from benchmarks.controlplane_parts.samples import Samples
from benchmarks.harness.clocks import describe_machine
from benchmarks.harness.processes import Child

CONCURRENCIES = (1, 32, 256)
START_TIMEOUT_S = 60.0
FLOOR = "floor"


@dataclass(frozen=True, slots=True)
class System:
    """How to serve and measure one system."""

    name: str
    serve: Callable[[Connection], None]
    measure: Callable[[str, int, float], Samples]


SYSTEMS = (
    System("ours", ours.serve, ours.measure),
    System("a", echo.serve, echo.measure),
    System("b", http_meta.serve, partial(http_meta.measure, keep_alive=False)),
    System("c", http_meta.serve, partial(http_meta.measure, keep_alive=True)),
    System(FLOOR, echo.serve, echo.measure_stream),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the result; the fields are the contract of ``--json``."""

    system: str
    concurrency: int
    p50_us: float
    p99_us: float
    per_s: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """One target, and what was reached."""

    target: str
    reached: float
    met: bool


def run(rounds: int, duration_s: float) -> list[Row]:
    """Measure every system at every concurrency."""
    # The libraries of all systems are loaded here; looking through them again and again would disturb every system.
    gc.collect()
    gc.freeze()
    with ExitStack() as stack:
        addresses = {}
        for system in SYSTEMS:
            server = stack.enter_context(Child(system.serve))
            if not server.pipe.poll(START_TIMEOUT_S):
                raise RuntimeError(f"the server of {system.name} did not start within {START_TIMEOUT_S:g} s")
            addresses[system.name] = server.pipe.recv()
        rows = []
        for concurrency in CONCURRENCIES:
            samples: dict[str, list[Samples]] = {system.name: [] for system in SYSTEMS}
            for _ in range(rounds):
                for system in SYSTEMS:
                    samples[system.name].append(system.measure(addresses[system.name], concurrency, duration_s))
            rows += [median_row(name, concurrency, taken) for name, taken in samples.items()]
        return rows


def median_row(system: str, concurrency: int, taken: Sequence[Samples]) -> Row:
    """The row of the round with the median rate."""
    chosen = sorted(taken, key=lambda samples: samples.per_s)[len(taken) // 2]
    return Row(
        system,
        concurrency,
        round(chosen.percentile_us(0.50), 1),
        round(chosen.percentile_us(0.99), 1),
        round(chosen.per_s, 1),
    )


def judge(rows: Sequence[Row]) -> list[Verdict]:
    """Compare with the targets."""
    by_key = {(row.system, row.concurrency): row for row in rows}
    p50_ratio = by_key["ours", 1].p50_us / by_key["a", 1].p50_us
    verdicts = [Verdict("p50 of ours / p50 of a at 1: at most 0.5", round(p50_ratio, 2), p50_ratio <= 0.5)]
    for concurrency in (32, 256):
        for peer, wanted in (("a", 8), ("c", 50)):
            ratio = by_key["ours", concurrency].per_s / by_key[peer, concurrency].per_s
            target = f"rate of ours / rate of {peer} at {concurrency}: at least {wanted}"
            verdicts.append(Verdict(target, round(ratio, 1), ratio >= wanted))
    return verdicts


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--quick", action="store_true", help="one short round; figures are rough, so no verdicts on targets"
    )
    args = parser.parse_args(arguments)
    rows = run(1, 0.5) if args.quick else run(3, 2.0)
    verdicts = [] if args.quick else judge(rows)
    if args.json:
        result = {
            "machine": describe_machine(),
            "rows": [asdict(row) for row in rows if row.system != FLOOR],
            "floor": [asdict(row) for row in rows if row.system == FLOOR],
            "targets": [asdict(verdict) for verdict in verdicts],
        }
        print(json.dumps(result, indent=1))
        return 0
    print(f"{'system':<7}{'concurrency':>12}{'p50 us':>12}{'p99 us':>12}{'per s':>12}")
    for row in rows:
        print(f"{row.system:<7}{row.concurrency:>12}{row.p50_us:>12.0f}{row.p99_us:>12.0f}{row.per_s:>12.0f}")
    for verdict in verdicts:
        print(f"{'met    ' if verdict.met else 'MISSED '}{verdict.target} (reached {verdict.reached})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
