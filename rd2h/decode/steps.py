"""What a serving thread is told to do next for a connection."""

from collections.abc import Sequence
from typing import NamedTuple

from rd2h.decode.chunks import Chunk
from rd2h.plan import Descriptors
from rd2h.wire import ReadyHead


class Answer(NamedTuple):
    """What to do next for a connection: open a session, or send these messages."""

    payloads: tuple[bytes, ...] = ()
    open_session: str | None = None


class LayerRead(NamedTuple):
    """One layer of a read, as Prefill named it and by its position here."""

    head: ReadyHead
    layer_idx: int


class ReadTask(NamedTuple):
    """One batched read that may start now, of one layer or a few of the same chunk; ``finish_read`` must follow."""

    layers: Sequence[LayerRead]
    chunk: Chunk
    session: str
    descriptors: Descriptors
    read_id: int

    @property
    def nothing_to_read(self) -> bool:
        """No block falls to this rank, or every request was refused; the layers are acknowledged all the same."""
        return len(self.descriptors.lengths) == 0

    @property
    def request_ids(self) -> Sequence[str]:
        """Decode's request ids that the read concerns."""
        return [piece.child.spec.request_id for piece in self.chunk.pieces]
