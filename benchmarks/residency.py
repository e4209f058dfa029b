"""What planning the hot buffer costs in a decode step, beside the copies that it plans.

    python -m benchmarks.residency [--json] [--quick]

32 rows, top-k 2,048, buffer 4,096 tokens, 61 layers; a token is 1,024 bytes of K and 128 bytes of V (BF16 512 + 64).
Localities 50, 90 and 99 %: that part of a layer's selection is as in the step before, the rest was not in it (it may
still lie in the buffer from earlier; the hit rate that came out is stated).

How it is measured:

* Planning is one call for a layer: look-up, eviction, and source and target rows of every miss. All 61 layers have
  tables of their own and are planned in turn, as in a step, so that their state comes from memory, not from the cache.
* ``plan_ms``: the planner as installed (the compiled kernel, unless there is no compiler). ``plan_numpy_ms``: its NumPy
  form. ``plan_dict_ms``: an OrderedDict for each row, in plain Python. The latter two run on fewer layers.
* ``gather_ms``: a bare ``numpy.take`` of the rows that missed, K and V, out of a pool that no cache holds, into memory
  that has been touched. ``gather_selected_ms``: the same for all 32 x 2,048 selected rows. ``copy_ms``: the product's
  own copy of the misses, K and V, from pool to hot buffer; it follows the gather, so its sources are partly cached.
* All of them run layer by layer in the same loop of the same process; medians over layers and steps, milliseconds a
  layer. ``..._per_step`` is the sum over 61 layers, mean of the steps.
* Before measuring, a first step fills the buffers and some more warm up.

Goal: at 90 % locality planning takes no longer than ``gather_ms``.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from benchmarks.harness.clocks import describe_machine
from benchmarks.residency_parts.plain_lru import PlainTable
from benchmarks.residency_parts.selections import SelectionStream
from rd2h.offload.copier import HostCopier, RowMemory
from rd2h.offload.kernel import load_kernel
from rd2h.offload.residency import Geometry, Int64s, Plan, Question, ResidencyTable, Workspace

ROWS, TOPK, CAPACITY, LAYERS = 32, 2048, 4096, 61
BLOCK_SIZE, NUM_BLOCKS, POSITIONS = 128, 4096, 32_768
WIDTHS = (1024, 128)
Result = TypeVar("Result")
GROUPS = 8
"""Different selections in a step; layer i follows selection i mod GROUPS."""
LOCALITIES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    warm_steps: int
    steps: int
    numpy_layers: int
    dict_layers: int


FULL = Effort(warm_steps=4, steps=12, numpy_layers=6, dict_layers=2)
QUICK = Effort(warm_steps=1, steps=2, numpy_layers=1, dict_layers=1)


@dataclass(frozen=True, slots=True)
class Row:
    """One locality; milliseconds are medians for one layer."""

    locality: float
    hit_rate: float
    misses_per_layer: int
    miss_bytes_per_layer: int
    plan_ms: float
    plan_numpy_ms: float
    plan_dict_ms: float
    gather_ms: float
    gather_selected_ms: float
    copy_ms: float
    plan_ms_per_step: float
    gather_ms_per_step: float
    plan_over_gather: float


@dataclass(slots=True)
class Times:
    """Seconds of every measured call, and what the plans said."""

    plan: list[float] = field(default_factory=list)
    plan_numpy: list[float] = field(default_factory=list)
    plan_dict: list[float] = field(default_factory=list)
    gather: list[float] = field(default_factory=list)
    selected: list[float] = field(default_factory=list)
    copy: list[float] = field(default_factory=list)
    hits: int = 0
    misses: int = 0


class Bench:
    """Pool, hot buffers and tables of one locality."""

    def __init__(self, effort: Effort, pool: Sequence[npt.NDArray[np.uint8]], seed: int) -> None:
        rng = np.random.default_rng(seed)
        geometry = Geometry(ROWS, CAPACITY, TOPK, BLOCK_SIZE, NUM_BLOCKS)
        kernel, workspace = load_kernel(), Workspace(geometry)
        self._effort, self._pool_arrays = effort, pool
        self._tables = [ResidencyTable(geometry, workspace, kernel) for _ in range(LAYERS)]
        self._numpy_tables = [ResidencyTable(geometry, workspace) for _ in range(effort.numpy_layers)]
        self._plain_tables = [PlainTable(ROWS, CAPACITY, BLOCK_SIZE) for _ in range(effort.dict_layers)]
        self._stream = SelectionStream(GROUPS, ROWS, TOPK, POSITIONS, seed)
        self._keys = np.arange(1, ROWS + 1, dtype=np.uint64)
        self._prefix = np.full(ROWS, POSITIONS, np.int64)
        self._blocks = rng.integers(0, NUM_BLOCKS, (ROWS, POSITIONS // BLOCK_SIZE), dtype=np.int32)
        self._pairs = [
            (RowMemory.over(np.ones(ROWS * CAPACITY * width, np.uint8), width), RowMemory.over(array, width))
            for array, width in zip(pool, WIDTHS, strict=True)
        ]
        self._gathered = [np.ones((ROWS * TOPK, width), np.uint8) for width in WIDTHS]
        self._copier = HostCopier(kernel)

    def measure(self, locality: float) -> Row:
        """Warm up, then measure."""
        for _ in range(self._effort.warm_steps + 1):
            self._step(locality, Times())
        times = Times()
        for _ in range(self._effort.steps):
            self._step(locality, times)
        calls = self._effort.steps * LAYERS
        plan, gather = _median_ms(times.plan), _median_ms(times.gather)
        return Row(
            locality=locality,
            hit_rate=round(times.hits / (times.hits + times.misses), 4),
            misses_per_layer=times.misses // calls,
            miss_bytes_per_layer=times.misses // calls * sum(WIDTHS),
            plan_ms=plan,
            plan_numpy_ms=_median_ms(times.plan_numpy),
            plan_dict_ms=_median_ms(times.plan_dict),
            gather_ms=gather,
            gather_selected_ms=_median_ms(times.selected),
            copy_ms=_median_ms(times.copy),
            plan_ms_per_step=round(sum(times.plan) * 1e3 / self._effort.steps, 3),
            gather_ms_per_step=round(sum(times.gather) * 1e3 / self._effort.steps, 3),
            plan_over_gather=round(plan / gather, 3),
        )

    def _step(self, locality: float, times: Times) -> None:
        selections = self._stream.step(locality)
        for layer, table in enumerate(self._tables):
            topk = selections[layer % GROUPS]
            question = Question(topk, self._keys, self._prefix, self._blocks)
            plan = _timed(times.plan, table.plan, question)
            _timed(times.gather, self._gather, plan.sources)
            _timed(times.copy, self._copy, plan)
            times.hits += plan.hits
            times.misses += plan.misses
            if layer < len(self._numpy_tables):
                _check_equal(plan, _timed(times.plan_numpy, self._numpy_tables[layer].plan, question))
                _timed(times.selected, self._gather, self._pool_rows(topk))
            if layer < len(self._plain_tables):
                _timed(times.plan_dict, self._plain_tables[layer].plan, topk, self._blocks)

    def _pool_rows(self, topk: Int64s) -> Int64s:
        blocks = np.take_along_axis(self._blocks, topk // BLOCK_SIZE, 1).astype(np.int64)
        return (blocks * BLOCK_SIZE + topk % BLOCK_SIZE).reshape(-1)

    def _gather(self, rows: Int64s) -> None:
        for source, target in zip(self._pool_arrays, self._gathered, strict=True):
            np.take(source, rows, axis=0, out=target[: len(rows)], mode="clip")

    def _copy(self, plan: Plan) -> None:
        self._copier.copy(self._pairs, plan.targets, plan.sources)


def _timed(seconds: list[float], function: Callable[..., Result], *args: object) -> Result:
    started = time.perf_counter()
    result = function(*args)
    seconds.append(time.perf_counter() - started)
    return result


def _median_ms(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 4)


def _check_equal(plan: Plan, other: Plan) -> None:
    for name in ("slots", "sources", "targets"):
        if not np.array_equal(getattr(plan, name), getattr(other, name)):
            raise SystemExit(f"the kernel and NumPy disagree about {name}: these figures mean nothing")


def measure(effort: Effort, localities: Sequence[float]) -> dict[str, object]:
    """The whole result object."""
    pool = tuple(np.ones((NUM_BLOCKS * BLOCK_SIZE, width), np.uint8) for width in WIDTHS)
    rows = []
    for seed, locality in enumerate(localities):
        rows.append(Bench(effort, pool, seed).measure(locality))
        _progress(rows[-1])
    at_90 = [row.plan_over_gather for row in rows if row.locality == 0.9]
    return {
        "machine": describe_machine(),
        "sizes": {
            "rows": ROWS,
            "topk": TOPK,
            "buffer_tokens": CAPACITY,
            "layers": LAYERS,
            "positions": POSITIONS,
            "token_bytes": sum(WIDTHS),
            "pool_bytes": sum(array.nbytes for array in pool),
        },
        "kernel": "compiled" if load_kernel() is not None else "numpy",
        "rows_ms": [asdict(row) for row in rows],
        "goal": {"plan_over_gather_at_90_percent": at_90, "reached": all(ratio <= 1 for ratio in at_90)},
    }


def _progress(row: Row) -> None:
    print(
        f"locality {row.locality:4.0%}, hits {row.hit_rate:6.1%}, {row.misses_per_layer:6d} misses a layer: plan "
        f"{row.plan_ms:7.3f} ms = {row.plan_over_gather:5.2f} x gather {row.gather_ms:7.3f} ms (all selected "
        f"{row.gather_selected_ms:7.3f} ms, own copy {row.copy_ms:7.3f} ms); NumPy {row.plan_numpy_ms:7.3f} ms, dict "
        f"{row.plan_dict_ms:7.3f} ms; step: plan {row.plan_ms_per_step:.1f} ms, gather {row.gather_ms_per_step:.1f} ms",
        file=sys.stderr,
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions: a smoke run, not a measurement")
    options = parser.parse_args(arguments)
    result = measure(QUICK if options.quick else FULL, LOCALITIES)
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        print(f"goal: {result['goal']}; machine: {result['machine']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
