"""What a scheduler half tells its worker halves in one engine step (pickled by vLLM), and what workers tell back."""

from collections.abc import Sequence
from dataclasses import dataclass

from rd2h.gates import Writes
from rd2h.params import RemoteDecode


@dataclass(frozen=True, slots=True)
class Publication:
    """Blocks of one Prefill request that one child may read after this step's forward, layer by layer."""

    child: RemoteDecode
    external_id: str
    start_block: int
    main_blocks: Sequence[int]
    indexer_blocks: Sequence[int]
    final: bool
    prompt_blocks: Sequence[int] = ()
    """All main blocks of the prompt so far, if a connector beside ours may have loaded some; else empty."""


@dataclass(frozen=True, slots=True)
class ChildFailure:
    """A child that Prefill will not deliver."""

    child: RemoteDecode
    reason: str


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """One step of a Prefill engine."""

    writes: Writes
    publications: Sequence[Publication] = ()
    failures: Sequence[ChildFailure] = ()


@dataclass(frozen=True, slots=True)
class Pull:
    """Destination of one Decode request; block ids of main and indexer from the start blocks on."""

    token: bytes
    request_id: str
    external_id: str
    main_blocks: Sequence[int]
    indexer_blocks: Sequence[int]
    start_block: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A Decode request that was never advertised, and the main blocks that will not be filled."""

    request_id: str
    reason: str
    main_blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One step of a Decode engine."""

    pulls: Sequence[Pull] = ()
    aborts: Sequence[str] = ()
    """Request ids to fence."""
    failures: Sequence[tuple[bytes, str]] = ()
    """(token, reason) of children whose Prefill is known to have failed."""
    refused: Sequence[Refused] = ()
    """Reported failed at once."""
    prefill_generations: frozenset[int] | None = None
    """Registered Prefill generations; None when unchanged."""
