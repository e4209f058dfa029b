"""What an engine reports about its load."""

from dataclasses import dataclass

import pytest

from rd2h.load import Load, LoadMeter


@dataclass
class Pool:
    num_gpu_blocks: int
    free: int

    def get_num_free_blocks(self) -> int:
        return self.free


def test_an_engine_without_a_pool_says_that_its_room_is_unknown() -> None:
    assert LoadMeter(128, 1).read() == Load(0, 0, 0, 0)


@pytest.mark.parametrize(("groups", "free_tokens", "total_tokens"), [(1, 1280, 12800), (2, 640, 6400)])
def test_room_counts_tokens_that_fit_into_every_cache_group(groups: int, free_tokens: int, total_tokens: int) -> None:
    pool = Pool(num_gpu_blocks=101, free=10)
    meter = LoadMeter(128, groups)
    meter.bind(pool)
    assert meter.read() == Load(0, 0, free_tokens, total_tokens)
    pool.free = 100
    assert meter.read().free_kv_tokens == total_tokens


def test_requests_that_end_after_the_last_step_no_longer_count() -> None:
    meter = LoadMeter(16, 1)
    meter.pulling = lambda: 3
    meter.scheduled({"a": 5, "b": 1})
    assert meter.read()[:2] == (2, 3)
    meter.scheduled(["b", "c"])
    meter.finished("b")
    meter.finished("unknown")
    assert meter.read().running == 1
    meter.finished("c")
    assert meter.read().running == 0
