"""How busy this engine is: told by vLLM's scheduler thread, read by the control plane's at every keep-alive."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class BlockPool(Protocol):
    """What is asked of vLLM's pool of KV blocks, one of which is never given out."""

    num_gpu_blocks: int

    def get_num_free_blocks(self) -> int:
        """Blocks that may be given out now, prefix-cached ones that nobody uses among them."""
        ...


class Load(NamedTuple):
    """Requests and KV room of an engine at one moment; ``total_kv_tokens`` 0: the room is not known."""

    running: int
    pulling: int
    free_kv_tokens: int
    total_kv_tokens: int


@dataclass(slots=True, eq=False)
class LoadMeter:
    """Reads nothing but sizes from the other thread. A token takes one place of a block in each cache group."""

    block_size_tokens: int
    cache_groups: int
    pulling: Callable[[], int] = lambda: 0
    _running: frozenset[str] = frozenset()
    _pool: BlockPool | None = None

    def bind(self, pool: BlockPool) -> None:
        """vLLM's block pool, once it exists."""
        self._pool = pool

    def scheduled(self, request_ids: Iterable[str]) -> None:
        """The requests of a step."""
        self._running = frozenset(request_ids)

    def finished(self, request_id: str) -> None:
        """A request has ended; an engine that becomes idle makes no further step."""
        self._running -= {request_id}

    def read(self) -> Load:
        """The load now."""
        pool = self._pool
        if pool is None:
            return Load(len(self._running), self.pulling(), 0, 0)
        free, total = pool.get_num_free_blocks(), pool.num_gpu_blocks - 1
        return Load(len(self._running), self.pulling(), self._tokens(free), self._tokens(total))

    def _tokens(self, blocks: int) -> int:
        return blocks // self.cache_groups * self.block_size_tokens
