"""Decode's scheduler half: adverts, destinations, aborts and ends of requests whose KV comes from elsewhere."""

import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rd2h.children import FailureKind
from rd2h.control import Advert, ControlPlane
from rd2h.errors import QueueFullError, RequestError
from rd2h.groups import CacheGroups
from rd2h.layout import Contract
from rd2h.params import external_id, parse_remote_prefill, place_of
from rd2h.stats import TransferStats, failures_of
from rd2h.steps import DecodeStep, Pull, Refused
from rd2h.timeline import Timeline
from rd2h.vllm_compat import ScheduledRequest

logger = logging.getLogger(__name__)


class PullState(Enum):
    """A request between its advert and vLLM's notice that its KV has (not) come."""

    PULLING = "pulling"
    ABORTING = "aborting"
    FAILING = "failing"
    REFUSED = "refused"


@dataclass(slots=True)
class Pulling:
    """One request that waits for remote KV; ``advert`` is None for one that was refused before it was advertised."""

    state: PullState
    advert: Advert | None
    reason: str = "Decode could not receive its KV"
    """Why it failed, once a worker has said so."""


class DecodeScheduler:
    """See the module. Every request that waits for remote KV is reported by the workers exactly once."""

    def __init__(
        self, groups: CacheGroups, contract: Contract, control: ControlPlane | None, timeline: Timeline
    ) -> None:
        self._groups, self._control, self._timeline = groups, control, timeline
        self._has_indexer = any(indexer for _, _, indexer, _ in contract.layers)
        self._pulling: dict[str, Pulling] = {}
        self._pulls: list[Pull] = []
        self._aborts: list[str] = []
        self._refused: list[Refused] = []
        self._generations: frozenset[int] = frozenset()
        self._prompts: dict[str, int] = {}
        self.stats = TransferStats()

    @property
    def pulling(self) -> int:
        """Requests whose KV is still being pulled."""
        return len(self._pulling)

    def remaining_tokens(self, prompt_tokens: int, computed_tokens: int) -> int:
        """Prompt tokens whose KV must come from Prefill."""
        return max(0, prompt_tokens - computed_tokens)

    def allocated(
        self,
        request_id: str,
        params: dict[str, Any],
        block_ids: Sequence[Sequence[int]],
        prompt_tokens: int,
        external_tokens: int,
    ) -> None:
        """vLLM has allocated the destination: remember it, advertise the child, clear ``do_remote_prefill``."""
        params["do_remote_prefill"] = False
        block_size = self._groups.block_size_tokens
        start, stop = (prompt_tokens - external_tokens) // block_size, -(-prompt_tokens // block_size)
        main, indexer = self._groups.ids(block_ids)
        try:
            advert = self._advertise(request_id, params, prompt_tokens, external_tokens)
        except (RequestError, QueueFullError) as error:
            logger.warning("rd2h: request %s is refused: %s", request_id, error)
            self.stats.add(**{failures_of(FailureKind.NOT_ADVERTISED): 1})
            self._pulling[request_id] = Pulling(PullState.REFUSED, None)
            self._refused.append(Refused(request_id, str(error), list(main[start:stop])))
            return
        self._pulling[request_id] = Pulling(PullState.PULLING, advert)
        # vLLM takes an id again only when its earlier request is gone: a fence that still waits is for that one.
        self._aborts = [aborted for aborted in self._aborts if aborted != request_id]
        self._pulls.append(
            Pull(
                advert.token,
                request_id,
                external_id(request_id),
                list(main[start:stop]),
                list(indexer[start:stop]) if self._has_indexer else [],
                start,
            )
        )

    def finished(self, request_id: str, params: dict[str, Any], *, error: bool = False) -> None:
        """vLLM ends a request: fence it if its KV is still coming, take it back if it was never advertised.

        With ``error`` vLLM itself ends it; for a failed load that comes before the report with the reason.
        """
        self._prompts.pop(request_id, None)
        entry = self._pulling.get(request_id)
        if entry is not None:
            if entry.state is PullState.PULLING and entry.advert is not None:
                self._aborts.append(request_id)
                if error:
                    entry.state = PullState.FAILING
                    return
                entry.state = PullState.ABORTING
                self._withdraw(entry.advert, "aborted", "aborted by its client")
        elif params.get("do_remote_prefill") is True:
            try:
                advert = self._advert(request_id, params, b"", 0, 0)
            except RequestError:
                return  # it can be matched to no rendezvous, so nobody waits for it
            self._withdraw(advert, "aborted", "ended before it was scheduled")

    def note_reasons(self, reasons: Mapping[str, str]) -> None:
        """Why requests failed on a rank; comes with or before their report."""
        for request_id, reason in reasons.items():
            entry = self._pulling.get(request_id)
            if entry is not None:
                entry.reason = reason

    def received(self, finished: Sequence[str], failed: Sequence[str]) -> None:
        """Workers have reported these requests; vLLM schedules or frees them now."""
        failures = set(failed)
        for request_id in finished:
            entry = self._pulling.pop(request_id, None)
            if entry is None or entry.advert is None or entry.state is PullState.ABORTING:
                continue
            if request_id in failures or entry.state is PullState.FAILING:
                self._withdraw(entry.advert, "failed", entry.reason)
            else:
                self._withdraw(entry.advert, "done", "")

    def step(self, scheduled: Sequence[ScheduledRequest]) -> DecodeStep:
        """Metadata of one engine step."""
        self._count_computed(scheduled)
        failures: list[tuple[bytes, str]] = []
        generations = None
        if self._control is not None:
            for notice in self._control.drain_notices():
                entry = self._pulling.get(notice.request_id)
                advert = entry.advert if entry is not None and entry.state is PullState.PULLING else None
                # A notice for an earlier request of the same id comes from another rendezvous.
                if advert is not None and advert.rendezvous_id == notice.rendezvous_id:
                    failures.append((advert.token, notice.reason))
            registered = self._control.registered().prefill_generations
            if registered != self._generations:
                generations = self._generations = registered
        step = DecodeStep(self._pulls, self._aborts, failures, self._refused, generations)
        self._pulls, self._aborts, self._refused = [], [], []
        return step

    def _count_computed(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Count prompt tokens that this engine computes; requests past their prompt cost a dictionary miss."""
        tokens = 0
        for request in scheduled:
            if request.prompt_tokens is not None:
                self._prompts[request.request_id] = request.prompt_tokens
            prompt = self._prompts.get(request.request_id)
            if prompt is None:
                continue
            end = request.num_computed_tokens + request.num_scheduled_tokens
            tokens += max(0, min(end, prompt) - request.num_computed_tokens)
            if end >= prompt:
                del self._prompts[request.request_id]
        if tokens:
            self.stats.add(prompt_tokens_computed=tokens)

    def _advertise(self, request_id: str, params: dict[str, Any], prompt_tokens: int, external_tokens: int) -> Advert:
        if self._control is None:
            raise RequestError("no meta_service is configured on this Decode engine")
        cached = prompt_tokens - external_tokens
        advert = self._advert(request_id, params, secrets.token_bytes(16), cached, prompt_tokens)
        self._control.advertise(advert)
        self._timeline.event("advertise", request=request_id, cached_tokens=cached, prompt_tokens=prompt_tokens)
        return advert

    def _advert(
        self, request_id: str, params: dict[str, Any], token: bytes, cached_tokens: int, prompt_tokens: int
    ) -> Advert:
        remote = parse_remote_prefill(params)
        prompt_index, choice_index = place_of(request_id, remote.x_request_id)
        return Advert(remote.rendezvous_id, request_id, token, cached_tokens, prompt_tokens, prompt_index, choice_index)

    def _withdraw(self, advert: Advert, outcome: str, reason: str) -> None:
        if self._control is not None:
            self._control.withdraw(advert, outcome, reason)
