"""Processes for hot-path tests: started once, handed from test to test, replaced when a test has harmed them."""

from collections.abc import Callable, Iterator

import pytest

pytest.register_assert_rewrite("harness.pair", "harness.waiting", "harness.scripted")

from harness.scripted import ScriptedDecode  # noqa: E402
from harness.worker import Worker  # noqa: E402 (after the line above, which concerns it)

TakeWorker = Callable[[], Worker]


@pytest.fixture(scope="session")
def _spare() -> Iterator[list[Worker]]:
    spare: list[Worker] = []
    yield spare
    for worker in spare:
        worker.kill()


@pytest.fixture
def take_worker(_spare: list[Worker]) -> Iterator[TakeWorker]:
    """Each call gives a worker process of its own for this test."""
    taken: list[Worker] = []

    def take() -> Worker:
        taken.append(_spare.pop() if _spare else Worker())
        return taken[-1]

    yield take
    for worker in taken:
        if worker.release():
            _spare.append(worker)
        else:
            worker.kill()


@pytest.fixture
def scripted() -> Iterator[Callable[..., ScriptedDecode]]:
    made: list[ScriptedDecode] = []

    def make(**kwargs: object) -> ScriptedDecode:
        made.append(ScriptedDecode(**kwargs))
        return made[-1]

    yield make
    for decode in made:
        decode.close()
