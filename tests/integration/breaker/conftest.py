"""Worker processes for attacks: each is used by one test only, which may harm it."""

from collections.abc import Callable, Iterator

import pytest
from harness.worker import Worker

TakeWorker = Callable[[], Worker]


@pytest.fixture
def take_worker() -> Iterator[TakeWorker]:
    taken: list[Worker] = []

    def take() -> Worker:
        taken.append(Worker())
        return taken[-1]

    yield take
    for worker in taken:
        worker.kill()
