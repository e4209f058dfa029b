"""Prefill's scheduler half: which blocks each step makes readable, for which children, and what it overwrites."""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rd2h.control import ControlPlane
from rd2h.errors import RequestError
from rd2h.gates import Writes
from rd2h.groups import CacheGroups
from rd2h.layout import Contract
from rd2h.params import RemoteDecode, RemoteDecodes, external_id, parse_remote_decodes
from rd2h.prefill.admission import AdmissionRules
from rd2h.steps import ChildFailure, PrefillStep, Publication
from rd2h.timeline import Timeline
from rd2h.vllm_compat import BlockTables, ScheduledRequest

logger = logging.getLogger(__name__)

MAX_ENDED_CHILDREN = 16384
"""Children of ended requests whose failure is still passed on: their KV may be on its way; the oldest is forgotten."""

MAX_REPORTED_CHILDREN = 4096
"""Children in one report of a failure; the meta service takes no more by default."""


@dataclass(slots=True)
class Published:
    """One Prefill request with the children it feeds and how far they have been told."""

    children: tuple[RemoteDecode, ...]
    rendezvous_id: str
    prompt_tokens: int
    published_tokens: int = 0
    final: bool = False


@dataclass(slots=True)
class Arrival:
    """A request that vLLM would schedule, with the children whose Decode is not known to be registered."""

    unseen: tuple[RemoteDecode, ...]
    deadline_s: float


class PrefillScheduler:
    """See the module. Publishes ``[max(cached on Decode, published) // bs, computed // bs)``, rounded up at the end.

    A Decode that the registry's watch has not seen yet gets ``registration_wait_s`` to appear.
    """

    def __init__(
        self,
        groups: CacheGroups,
        contract: Contract,
        rules: AdmissionRules,
        control: ControlPlane | None,
        timeline: Timeline | None = None,
        registration_wait_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        beside_loaders: bool = False,
    ) -> None:
        self._groups, self._rules, self._control = groups, rules, control
        self._registration_wait_s, self._clock = registration_wait_s, clock
        self._beside_loaders = beside_loaders
        self._arrivals: dict[str, Arrival] = {}
        """Requests in vLLM's queue that it has tried to schedule."""
        self._parsed: tuple[dict[str, Any], RemoteDecodes] | None = None
        """The latest parameters: vLLM asks twice in a row for the same request."""
        self._timeline = timeline or Timeline("P", None)
        self._has_indexer = any(indexer for _, _, indexer, _ in contract.layers)
        self._tables = BlockTables()
        self._loading: tuple[set[int], set[int]] = set(), set()
        """Main and indexer blocks that a connector beside ours will load into."""
        self._requests: dict[str, Published] = {}
        self._failures: list[ChildFailure] = []
        self._ended: OrderedDict[RemoteDecode, str] = OrderedDict()
        """Rendezvous of children whose request is over."""

    def ready(self, request_id: str, params: dict[str, Any]) -> bool:
        """Whether a request with ``do_remote_decode`` may be scheduled now; False for at most the wait."""
        if self._registration_wait_s <= 0 or request_id in self._requests:
            return True
        arrival = self._arrivals.get(request_id)
        if arrival is None:
            try:
                children = self._parse(params).of_prompt(request_id)
            except RequestError:
                children = ()  # refused when it is tracked
            arrival = Arrival(children, self._clock() + self._registration_wait_s)
            self._arrivals[request_id] = arrival
        arrival.unseen = tuple(child for child in arrival.unseen if self._rules.unseen(child, self._control))
        if arrival.unseen and self._clock() >= arrival.deadline_s:
            arrival.unseen = ()
        return not arrival.unseen

    def track(self, request_id: str, params: dict[str, Any], prompt_tokens: int) -> None:
        """A request with ``do_remote_decode`` is about to run; never raises for bad parameters."""
        self._arrivals.pop(request_id, None)
        if request_id in self._requests:
            return
        remote = self._parse(params)
        self._parsed = None
        kept = []
        for child in self._children_of(request_id, remote):
            if foreign := self._rules.address_objection(child, self._control):
                self._report(remote.rendezvous_id, [child.request_id], foreign)
            elif reason := self._rules.objection(child, prompt_tokens):
                self._fail(remote.rendezvous_id, [child], reason)
            else:
                kept.append(child)
                self._timeline.event("rendezvous", request=child.request_id)
        # Remembered even without children: whoever was refused now has been told.
        self._requests[request_id] = Published(tuple(kept), remote.rendezvous_id, prompt_tokens)

    def loads(self, block_ids: Sequence[Sequence[int]], first_token: int, tokens: int) -> None:
        """A connector beside ours loads these tokens of a request, from the next step on: that overwrites their blocks
        as computing them would, and the request itself is scheduled with them, or only when they are there."""
        block_size = self._groups.block_size_tokens
        loaded = slice(first_token // block_size, -(-(first_token + tokens) // block_size))
        for writes, ids in zip(self._loading, self._groups.ids(block_ids), strict=True):
            writes.update(ids[loaded])

    def step(self, scheduled: Sequence[ScheduledRequest], finished: Sequence[str]) -> PrefillStep:
        """Metadata of one engine step."""
        self._tables.forget(finished)
        main_writes, indexer_writes = self._loading
        self._loading = set(), set()
        publications: list[Publication] = []
        block_size = self._groups.block_size_tokens
        for request in scheduled:
            main, indexer = self._groups.ids(self._tables.update(request))
            computed = request.num_computed_tokens + request.num_scheduled_tokens
            # To the end: behind the tokens of this step lie those that a draft model looks ahead to.
            written = slice(request.num_computed_tokens // block_size, None)
            main_writes.update(main[written])
            indexer_writes.update(indexer[written])
            entry = self._requests.get(request.request_id)
            if entry is not None and not entry.final:
                publications += self._publish(
                    request.request_id, entry, min(computed, entry.prompt_tokens), main, indexer
                )
        failures, self._failures = self._failures, []
        return PrefillStep(Writes(main_writes, indexer_writes), publications, failures)

    def finished(self, request_id: str, params: dict[str, Any], *, error: bool = False) -> None:
        """vLLM ends a request; children that were not told everything will get no more.

        With ``error`` vLLM itself ends it, for example because a sibling's load into its blocks failed: then what its
        children were told may be wrong.
        """
        self._arrivals.pop(request_id, None)
        entry = self._requests.pop(request_id, None)
        if entry is None and params.get("do_remote_decode") is True:
            self._unscheduled(request_id, params)
        elif entry is not None and error:
            self._fail(entry.rendezvous_id, entry.children, "Prefill ended the request as an error")
        elif entry is not None and not entry.final:
            self._fail(entry.rendezvous_id, entry.children, "Prefill ended the request before all KV was computed")
        elif entry is not None:
            self._ended.update(dict.fromkeys(entry.children, entry.rendezvous_id))
            while len(self._ended) > MAX_ENDED_CHILDREN:
                self._ended.popitem(last=False)

    def worker_failures(self, failures: Sequence[ChildFailure]) -> None:
        """Children that the publisher could not serve."""
        reasons = {failure.child: failure.reason for failure in failures}
        for entry in self._requests.values():
            lost = [child for child in entry.children if child in reasons]
            for child in lost:
                self._report(entry.rendezvous_id, [child.request_id], reasons[child])
            if lost:
                entry.children = tuple(child for child in entry.children if child not in reasons)
        for child, reason in reasons.items():
            rendezvous_id = self._ended.pop(child, None)
            if rendezvous_id is not None:
                self._report(rendezvous_id, [child.request_id], reason)

    def _unscheduled(self, request_id: str, params: dict[str, Any]) -> None:
        """A request that ended in the queue."""
        remote = parse_remote_decodes(params)
        children = self._children_of(request_id, remote)
        self._refuse(remote.rendezvous_id, children, "Prefill ended the request before it was computed")

    def _parse(self, params: dict[str, Any]) -> RemoteDecodes:
        if self._parsed is None or self._parsed[0] is not params:
            self._parsed = params, parse_remote_decodes(params)
        return self._parsed[1]

    def _children_of(self, request_id: str, remote: RemoteDecodes) -> Sequence[RemoteDecode]:
        """Children that a request feeds. Those that it should feed and cannot are told so, as far as they are known."""
        for broken in remote.broken:
            reason = f"Prefill cannot use its parameters: {broken.reason}"
            logger.warning("rd2h: request %s: child %s: %s", request_id, broken.request_id or "unknown", reason)
            if broken.reachable is not None and not self._rules.address_objection(broken.reachable, self._control):
                self._failures.append(ChildFailure(broken.reachable, reason))
            # Where not even its id is known, no child of this rendezvous can be told apart from it.
            self._report(remote.rendezvous_id, [broken.request_id] if broken.request_id else None, reason)
        try:
            return remote.of_prompt(request_id)
        except RequestError as error:
            # Prompts and children do not fit together: it is not known whose KV any request of this dispatch computes.
            logger.warning("rd2h: request %s publishes to nobody: %s", request_id, error)
            self._refuse(remote.rendezvous_id, remote.children, f"Prefill cannot place its request: {error}")
            return ()

    def _refuse(self, rendezvous_id: str, children: Sequence[RemoteDecode], reason: str) -> None:
        """Children that were told nothing yet get nothing: the meta service is told, and Decode where it may be."""
        known = [child for child in children if not self._rules.address_objection(child, self._control)]
        self._failures += [ChildFailure(child, reason) for child in known]
        self._report(rendezvous_id, [child.request_id for child in children], reason)

    def _publish(
        self, request_id: str, entry: Published, computed: int, main: Sequence[int], indexer: Sequence[int]
    ) -> list[Publication]:
        block_size = self._groups.block_size_tokens
        entry.final = computed >= entry.prompt_tokens
        stop = -(-computed // block_size) if entry.final else computed // block_size
        publications = []
        for child in entry.children:
            start = max(child.cached_tokens, entry.published_tokens) // block_size
            if start < stop or entry.final:
                blocks = slice(start, max(start, stop))
                publications.append(
                    Publication(
                        child,
                        external_id(request_id),
                        start,
                        list(main[blocks]),
                        list(indexer[blocks]) if self._has_indexer else [],
                        entry.final,
                        list(main[:stop]) if self._beside_loaders else (),
                    )
                )
        entry.published_tokens = max(entry.published_tokens, stop * block_size)
        return publications

    def _fail(self, rendezvous_id: str, children: Sequence[RemoteDecode], reason: str) -> None:
        self._failures += [ChildFailure(child, reason) for child in children]
        self._report(rendezvous_id, [child.request_id for child in children], reason)

    def _report(self, rendezvous_id: str, request_ids: Sequence[str] | None, reason: str) -> None:
        """Tell the meta service; None means all children of the rendezvous."""
        if self._control is None or not rendezvous_id:
            return
        if request_ids is None:
            self._control.report_failure(rendezvous_id, (), reason)
            return
        for begin in range(0, len(request_ids), MAX_REPORTED_CHILDREN):
            part = request_ids[begin : begin + MAX_REPORTED_CHILDREN]
            self._control.report_failure(rendezvous_id, part, reason)
