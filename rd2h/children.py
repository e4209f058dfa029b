"""Life of a child request on one Decode rank: pulling, fenced, held, finished; each reported exactly once.

A child is *fenced* when no new read may start for it: it was aborted, it failed, or it is complete. It becomes final
only when no read on it is in flight and its hold is over (after an engine error bytes may still land). Only then is it
reported, and only then may vLLM reuse its blocks. Pure state; time is passed in.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from rd2h.errors import RequestError, StateError
from rd2h.ledger import BlockRange, CoverageLedger
from rd2h.wire import BlockIds

MAX_CHILDREN = 65536
MAX_REMEMBERED = 65536


class ChildState(Enum):
    """Where a child is."""

    PULLING = "pulling"
    FENCED = "fenced"
    FINAL = "final"


class Outcome(Enum):
    """How a child ended on this rank."""

    DONE = "done"
    FAILED = "failed"
    ABORTED = "aborted"


class FailureKind(Enum):
    """Why a child failed, coarse enough to count."""

    READ_ERROR = "read_error"
    LEASE_EXPIRED = "lease_expired"
    PREFILL_FAILED = "prefill_failed"
    PEER_LOST = "peer_lost"
    MESSAGE_REFUSED = "message_refused"
    INCOMPLETE = "incomplete"
    TIMED_OUT = "timed_out"
    NOT_ADVERTISED = "not_advertised"
    OTHER = "other"


@dataclass(frozen=True, slots=True, eq=False)
class ChildSpec:
    """Destination of one child: block id of prompt block ``main_start + i`` is ``main_blocks[i]`` (int64[n])."""

    token: bytes
    request_id: str
    external_id: str
    main_blocks: BlockIds
    main_start: int
    indexer_blocks: BlockIds
    indexer_start: int

    @property
    def main_range(self) -> BlockRange:
        """Prompt blocks to pull into main."""
        return BlockRange(self.main_start, self.main_start + len(self.main_blocks))

    @property
    def indexer_range(self) -> BlockRange:
        """Prompt blocks to pull into the indexer."""
        return BlockRange(self.indexer_start, self.indexer_start + len(self.indexer_blocks))


@dataclass(frozen=True, slots=True)
class Finished:
    """Report of one child; ``reason`` is empty when done."""

    request_id: str
    token: bytes
    outcome: Outcome
    reason: str
    kind: FailureKind = field(default=FailureKind.OTHER, compare=False)
    """Meant for failed children only."""


@dataclass(slots=True, eq=False)
class Child:
    """One child and what has arrived for it."""

    spec: ChildSpec
    deadline_s: float
    state: ChildState = ChildState.PULLING
    outcome: Outcome | None = None
    reason: str = ""
    kind: FailureKind = FailureKind.OTHER
    hold_until_s: float = 0.0
    ledger: CoverageLedger | None = None
    sources: dict[int, object] = field(default_factory=dict)
    contributors_done: set[int] = field(default_factory=set)

    def admit(self, source: object, member: int, ratio: int, has_indexer: bool) -> CoverageLedger:
        """Bind contributor ``member`` of ``ratio`` to its connection; raises RequestError for a foreign one."""
        if self.ledger is None:
            indexer = self.spec.indexer_range if has_indexer else None
            self.ledger = CoverageLedger(self.spec.main_range, indexer, ratio)
        if self.ledger.contributors != ratio:
            raise RequestError(f"contributor ratio {ratio} differs from {self.ledger.contributors} seen before")
        if self.sources.setdefault(member, source) is not source:
            raise RequestError(f"contributor {member} already comes from another Prefill connection")
        return self.ledger


@dataclass(slots=True)
class ChildTable:
    """All children of one Decode rank. ``epoch`` changes whenever the set of pullable children may have changed."""

    idle_timeout_s: float
    epoch: int = 0
    _children: dict[bytes, Child] = field(default_factory=dict)
    _tokens: dict[str, bytes] = field(default_factory=dict)
    _external: dict[str, bytes] = field(default_factory=dict)
    _pulling: set[bytes] = field(default_factory=set)
    """Tokens of the children in state PULLING."""
    _fenced: dict[bytes, None] = field(default_factory=dict)
    _reads: dict[int, frozenset[bytes]] = field(default_factory=dict)
    _reports: list[Finished] = field(default_factory=list)
    _remembered: OrderedDict[bytes, tuple[str, FailureKind]] = field(default_factory=OrderedDict)
    _next_read: int = 0

    def __len__(self) -> int:
        return len(self._children)

    @property
    def reads_in_flight(self) -> int:
        """Engine reads that have begun and not returned."""
        return len(self._reads)

    def add(self, spec: ChildSpec, now_s: float) -> None:
        """A destination is known and may be written; refused ones, and those beyond the bound, are reported failed."""
        if spec.token in self._children:
            raise StateError(f"token of {spec.request_id!r} is already in use")
        if spec.request_id in self._tokens:
            raise StateError(f"{spec.request_id!r} is already being pulled")
        if (ended := self._remembered.get(spec.token)) is not None:
            self._reports.append(Finished(spec.request_id, spec.token, Outcome.FAILED, *ended))
            return
        if len(self._children) >= MAX_CHILDREN:
            reason = f"{MAX_CHILDREN} children are already being pulled"
            self._reports.append(Finished(spec.request_id, spec.token, Outcome.FAILED, reason))
            return
        self._children[spec.token] = Child(spec, now_s + self.idle_timeout_s)
        self._pulling.add(spec.token)
        self._tokens[spec.request_id] = spec.token
        self._external.setdefault(spec.external_id, spec.token)
        self.epoch += 1

    def get(self, token: bytes) -> Child | None:
        """A child that is not final."""
        return self._children.get(token)

    def token_of_request(self, request_id: str) -> bytes | None:
        """Token of a request that is not final."""
        return self._tokens.get(request_id)

    def token_of_external(self, external_id: str) -> bytes | None:
        """Token of the child that a legacy Prefill names by ``external_id``."""
        return self._external.get(external_id)

    def why_gone(self, token: bytes) -> str | None:
        """Reason of a child that is final and still remembered; None for a token never seen."""
        ended = self._remembered.get(token)
        return ended[0] if ended is not None else None

    def refuse(self, token: bytes, reason: str, kind: FailureKind = FailureKind.TIMED_OUT) -> None:
        """Remember that a token without a destination was refused, so that it is never served in part."""
        if token not in self._children:
            self._remember(token, reason, kind)

    # --- reads ---

    def begin_read(self, tokens: Iterable[bytes]) -> int:
        """A read that writes into these children starts; returns its id. All must be pulling."""
        touched = frozenset(tokens)
        if not self._pulling.issuperset(touched):
            raise StateError("a read may not start for a fenced child")
        self._next_read += 1
        self._reads[self._next_read] = touched
        return self._next_read

    def end_read(self, read_id: int, now_s: float) -> None:
        """The read has returned, with or without success."""
        touched = self._reads.pop(read_id)
        deadline = now_s + self.idle_timeout_s
        for token in touched:
            child = self._children.get(token)
            if child is not None:
                child.deadline_s = deadline
        if self._fenced:
            self._settle(now_s)

    # --- ends ---

    def contributor_done(self, token: bytes, member: int, now_s: float) -> None:
        """Contributor ``member`` says that its last layer of the last chunk is out; proof is the ledger."""
        child = self._children.get(token)
        if child is None or child.state is not ChildState.PULLING:
            return
        if child.ledger is not None and not 0 <= member < child.ledger.contributors:
            reason = f"contributor {member} is not one of the {child.ledger.contributors} seen before"
            self.fail(token, reason, now_s, kind=FailureKind.INCOMPLETE)
            return
        if child.ledger is None or not child.ledger.complete(member):
            owed = child.ledger.missing(member) if child.ledger else "every block"
            reason = f"Prefill reported the end but did not deliver {owed}"
            self.fail(token, reason, now_s, kind=FailureKind.INCOMPLETE)
            return
        child.contributors_done.add(member)
        if len(child.contributors_done) == child.ledger.contributors and child.ledger.all_complete():
            self._fence(child, Outcome.DONE, "", now_s, 0.0)

    def fail(
        self, token: bytes, reason: str, now_s: float, hold_s: float = 0.0, kind: FailureKind = FailureKind.OTHER
    ) -> None:
        """The child will not be delivered; ``hold_s`` keeps its blocks while bytes may still land."""
        child = self._children.get(token)
        if child is None:
            return
        if child.state is ChildState.FENCED:
            # Already ending: a later engine error still prolongs the hold, and a done child is no longer good.
            child.hold_until_s = max(child.hold_until_s, now_s + hold_s)
            if child.outcome is Outcome.DONE:
                child.outcome, child.reason, child.kind = Outcome.FAILED, reason, kind
            return
        child.kind = kind
        self._fence(child, Outcome.FAILED, reason, now_s, hold_s)

    def abort(self, request_id: str, now_s: float) -> bytes | None:
        """vLLM no longer wants the request; returns its token while it is known here."""
        token = self._tokens.get(request_id)
        child = self._children.get(token) if token is not None else None
        if token is None or child is None:
            return None
        if child.state is ChildState.PULLING:
            self._fence(child, Outcome.ABORTED, "aborted", now_s, 0.0)
        return token

    def expire(self, now_s: float) -> list[bytes]:
        """Fail children without progress for the idle time, settle held ones; returns the tokens that failed."""
        late = [t for t, c in self._children.items() if c.state is ChildState.PULLING and now_s >= c.deadline_s]
        for token in late:
            self.fail(token, f"no KV arrived for {self.idle_timeout_s:g} s", now_s, kind=FailureKind.TIMED_OUT)
        if self._fenced:
            self._settle(now_s)
        return late

    def feeds(self, source: object) -> bool:
        """Whether a child that is still being pulled has a contributor on this connection."""
        return any(
            child.state is ChildState.PULLING and any(bound is source for bound in child.sources.values())
            for child in self._children.values()
        )

    def fail_source(self, source: object, reason: str, now_s: float) -> list[bytes]:
        """Fail every pulling child with a contributor on a lost connection."""
        hit = [
            token
            for token, child in self._children.items()
            if child.state is ChildState.PULLING and any(bound is source for bound in child.sources.values())
        ]
        for token in hit:
            self.fail(token, reason, now_s, kind=FailureKind.PEER_LOST)
        return hit

    def take_finished(self) -> list[Finished]:
        """Reports since the last call; each child appears once in its life."""
        reports, self._reports = self._reports, []
        return reports

    def _fence(self, child: Child, outcome: Outcome, reason: str, now_s: float, hold_s: float) -> None:
        child.state, child.outcome, child.reason = ChildState.FENCED, outcome, reason
        self._pulling.discard(child.spec.token)
        child.hold_until_s = now_s + hold_s
        self._fenced[child.spec.token] = None
        self.epoch += 1
        self._settle(now_s)

    def _settle(self, now_s: float) -> None:
        for token in list(self._fenced):
            child = self._children[token]
            if now_s < child.hold_until_s or any(token in touched for touched in self._reads.values()):
                continue
            self._finish(child)

    def _finish(self, child: Child) -> None:
        spec = child.spec
        if child.outcome is None:
            raise StateError(f"{spec.request_id!r} is fenced without an outcome")
        child.state = ChildState.FINAL
        del self._fenced[spec.token], self._children[spec.token], self._tokens[spec.request_id]
        if self._external.get(spec.external_id) == spec.token:
            del self._external[spec.external_id]
        self._remember(spec.token, child.reason or child.outcome.value, child.kind)
        self._reports.append(Finished(spec.request_id, spec.token, child.outcome, child.reason, child.kind))

    def _remember(self, token: bytes, reason: str, kind: FailureKind) -> None:
        self._remembered[token] = (reason, kind)
        while len(self._remembered) > MAX_REMEMBERED:
            self._remembered.popitem(last=False)
