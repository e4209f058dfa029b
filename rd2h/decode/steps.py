"""What a serving thread is told to do next for a connection."""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from rd2h.decode.chunks import Chunk, Piece
from rd2h.engines import ReadResult
from rd2h.plan import Descriptors
from rd2h.wire import ReadyHead


class Answer(NamedTuple):
    """What to do next for a connection: open a session, or send these messages."""

    payloads: tuple[bytes, ...] = ()
    open_session: str | None = None


class Turn(Enum):
    """Who may go on with a connection's messages while one of its reads runs."""

    KEPT = "kept"
    """Only the reading thread, after the read."""
    GIVEN_UP = "given_up"
    """Whoever takes in its next message, or the reading thread after the read."""
    PASSED_ON = "passed_on"
    """Messages wait: another thread, to which the connection must be given before the read begins."""


class LayerRead(NamedTuple):
    """One layer of a read, as Prefill named it and by its position here, and how much of the read it is."""

    head: ReadyHead
    layer_idx: int
    nbytes: int


class ReadTask(NamedTuple):
    """One batched read that may start now, of a layer or a few of a chunk; its end must be told to the book."""

    layers: Sequence[LayerRead]
    chunk: Chunk
    pieces: Sequence[Piece]
    """Those of ``chunk`` when the read began. It writes into their blocks even when they leave the chunk meanwhile."""
    session: str
    descriptors: Descriptors
    read_id: int
    turn: Turn

    @property
    def nothing_to_read(self) -> bool:
        """No block falls to this rank, or every request was refused; the layers are acknowledged all the same."""
        return len(self.descriptors.lengths) == 0

    @property
    def request_ids(self) -> Sequence[str]:
        """Decode's request ids that the read concerns."""
        return [piece.child.spec.request_id for piece in self.pieces]


class ReadEnd(NamedTuple):
    """How a read ended, how long it took, and when it returned (on the clock of the read lease)."""

    result: ReadResult
    seconds: float
    at_ns: int = 0


class RunningRead:
    """A read that runs without its connection's turn; ``ended`` once it has returned."""

    __slots__ = ("ended", "task")

    def __init__(self, task: ReadTask) -> None:
        self.task = task
        self.ended: ReadEnd | None = None
