"""The connector's reports: a dead thread of Decode's data path must become visible."""

import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from rd2h.demo.vllm_cpu import answer_metadata_lookup

if "vllm" not in sys.modules:
    answer_metadata_lookup()

from rd2h.assembly import DecodeSchedulerSide
from rd2h.connector import SfaRemoteD2HConnector, WorkerReport


@dataclass
class Control:
    """Notes what it is told."""

    unhealthy: list[str] = field(default_factory=list)

    def note_unhealthy(self, reason: str) -> None:
        self.unhealthy.append(reason)


class Half:
    """A scheduler half that takes anything."""

    def note_reasons(self, reasons: object) -> None: ...

    def received(self, finished: object, failed: object) -> None: ...


def connector() -> Any:
    made: Any = object.__new__(SfaRemoteD2HConnector)
    made._prefill_scheduler = made._decode_scheduler = made._prefill_worker = made._decode_worker = None
    return made


def test_a_dead_thread_of_decode_turns_its_health() -> None:
    """One dead reading thread, or the keeper, is not seen by the probe: the other threads answer its heartbeat."""
    worker_side = connector()
    state = SimpleNamespace(alive=True, take_reasons=dict)
    worker_side._decode_worker = SimpleNamespace(worker=state)
    assert worker_side.build_connector_worker_meta() is None
    state.alive = False
    report = worker_side.build_connector_worker_meta()
    assert isinstance(report, WorkerReport)

    scheduler_side, control = connector(), Control()
    double: Any = control
    half: Any = Half()
    scheduler_side._decode_scheduler = DecodeSchedulerSide(half, double)
    output = SimpleNamespace(kv_connector_worker_meta=report, finished_recving=None, failed_recving=set())
    scheduler_side.update_connector_output(output)
    assert len(control.unhealthy) == 1
    assert "thread" in control.unhealthy[0]
