"""What tests tell the Prefill and Decode sides over their pipes."""

import secrets
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DecodeAddress:
    """Where a Decode engine listens: rank r on ``base_port + r``. ``generation`` None: a legacy Decode."""

    base_port: int
    generation: int | None
    tp_size: int = 1
    host: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Child:
    """One child request: prompt number ``content``, block ids of its prompt blocks on both sides.

    Prompt block ``start + i`` lies in ``d_main[i]`` on Decode; ``p_main`` and ``p_indexer`` go by prompt block.
    """

    name: str
    content: int
    p_main: list[int]
    p_indexer: list[int]
    d_main: list[int]
    d_indexer: list[int]
    start: int = 0
    token: bytes | None = field(default_factory=lambda: secrets.token_bytes(16))
    external_id: str = ""

    @property
    def blocks(self) -> int:
        """Prompt blocks."""
        return len(self.p_main)


@dataclass(frozen=True, slots=True)
class Part:
    """Prompt blocks ``start`` to ``stop`` of a child, published to one Decode."""

    child: Child
    target: DecodeAddress
    start: int
    stop: int
    final: bool


@dataclass(frozen=True, slots=True)
class Report:
    """A finished child on one Decode rank."""

    rank: int
    name: str
    outcome: str
    reason: str
