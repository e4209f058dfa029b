"""The data path's own threads run where they were told to."""

import os
import secrets
from pathlib import Path

import pytest

from rd2h.cpus import check_cpus
from rd2h.decode.destination import Destination
from rd2h.decode.options import PullerOptions
from rd2h.decode.puller import Puller
from rd2h.engines import EngineRole, create_engine
from rd2h.errors import ConfigError
from rd2h.layout import CacheLayout, LayerLayout, TensorLayout, encode_layer_map
from rd2h.prefill.publisher import Publisher, PublisherOptions, SourceMemory
from rd2h.stats import TransferStats
from rd2h.timeline import Timeline
from rd2h.wire import WIRE_VERSION, PeerInfo
from tests.harness.waiting import wait_for

USABLE = sorted(os.sched_getaffinity(0))
LAYOUT = CacheLayout((LayerLayout("l.0", (TensorLayout(0x1000, 64, 8),)),))


def threads() -> dict[int, str]:
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            found[int(task.name)] = (task / "comm").read_text().strip()
        except OSError:
            continue  # it has ended meanwhile
    return found


def bound_since(before: dict[int, str], cpu: int) -> list[str]:
    """Names of the threads started since ``before`` that may run on this processor only."""
    fresh = {number: name for number, name in threads().items() if number not in before}
    return sorted(name for number, name in fresh.items() if os.sched_getaffinity(number) == {cpu})


def test_the_pullers_threads_are_bound() -> None:
    cpu = USABLE[-1]
    engine = create_engine("null")
    engine.initialize(EngineRole.DECODE)
    before = threads()
    options = PullerOptions("127.0.0.1", 0, 7, b"", 1, read_threads=2, cpus=frozenset({cpu}))
    puller = Puller(options, Destination(LAYOUT, 0, 1, False), engine, TransferStats(), Timeline("D", None))
    puller.start()
    try:
        names = wait_for("bound threads", lambda: (found := bound_since(before, cpu))[4:] and found)
        own = [name for name in names if not name.startswith("ZMQ")]
        assert "ZMQbg/IO/0" in names
        assert len(own) == 3 or len(USABLE) == 1, "the three serving threads, not the keeper"
        assert os.sched_getaffinity(0) == set(USABLE)
    finally:
        puller.close()
        engine.close()


def test_the_publishers_threads_are_bound() -> None:
    cpu = USABLE[-1]
    before = threads()
    memory = SourceMemory(
        "session", encode_layer_map(LAYOUT), ["l.0"], [()], PeerInfo(WIRE_VERSION, secrets.randbits(63), b"", 1, 0)
    )
    publisher = Publisher(memory, PublisherOptions(cpus=frozenset({cpu})), TransferStats(), lambda refusals: None)
    publisher.start()
    try:
        wait_for("a bound thread", lambda: bound_since(before, cpu))
        assert os.sched_getaffinity(0) == set(USABLE)
    finally:
        publisher.close()


def test_processors_that_do_not_exist_are_refused_by_number() -> None:
    check_cpus("data_path_cpus", USABLE)
    with pytest.raises(ConfigError, match=r"data_path_cpus=.*not \[60000\]"):
        check_cpus("data_path_cpus", [USABLE[0], 60000])
    assert os.sched_getaffinity(0) == set(USABLE)
