"""A control plane that records, Prefill's scheduler half around it, children as a proxy describes them, and requests as
vLLM schedules them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rd2h.control import Advert, DecodeAddress, Notice, Registered
from rd2h.errors import QueueFullError
from rd2h.groups import CacheGroups
from rd2h.layout import Contract
from rd2h.prefill.admission import AdmissionRules
from rd2h.prefill.scheduler import PrefillScheduler
from rd2h.steps import Publication
from rd2h.vllm_compat import ScheduledRequest

BLOCK = 16
GROUPS = CacheGroups(main=0, indexer=1, block_size_tokens=BLOCK)
CONTRACT = Contract(1, "host", "", "m", "float32", BLOCK, (("l0", (64, 16), 32, 0), ("l1", (64, 16), 32, 0)))
DENSE = Contract(1, "host", "", "m", "float32", BLOCK, (("l0", (64,), 0, 0),))
GENERATION = 77


@dataclass
class RecordingControl:
    """What the scheduler halves told the meta service; ``notices`` and ``now_registered`` are set by the test."""

    adverts: list[Advert] = field(default_factory=list)
    withdrawn: list[tuple[str, str, str]] = field(default_factory=list)
    failures: list[tuple[str, tuple[str, ...], str]] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    now_registered: Registered = field(
        default_factory=lambda: Registered(frozenset(), frozenset({DecodeAddress(GENERATION, "10.0.0.2", 20050)}))
    )
    full: bool = False

    def advertise(self, advert: Advert) -> None:
        if self.full:
            raise QueueFullError("1024 adverts are open; no more are accepted")
        self.adverts.append(advert)

    def withdraw(self, advert: Advert, outcome: str, reason: str) -> None:
        self.withdrawn.append((advert.request_id, outcome, reason))

    def report_failure(self, rendezvous_id: str, request_ids: Sequence[str], reason: str) -> None:
        self.failures.append((rendezvous_id, tuple(request_ids), reason))

    def drain_notices(self) -> list[Notice]:
        notices, self.notices = self.notices, []
        return notices

    def registered(self) -> Registered:
        return self.now_registered

    def note_unhealthy(self, reason: str) -> None:
        pass

    def stop(self) -> None:
        pass


def token_of(number: int) -> str:
    return f"{number:032x}"


def child_params(request_id: str = "cmpl-x-0-aaaaaaaa", token: int = 1, **changes: Any) -> dict[str, Any]:
    """One child's parameters as Decode advertises and the proxy hands on; a change to None leaves the key out."""
    params: dict[str, Any] = {
        "request_id": request_id,
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_engine_id": "decode-0",
        "remote_host": "10.0.0.2",
        "remote_port": 20050,
        "remote_tp_size": 1,
        "remote_pcp_size": 1,
        "remote_dcp_size": 1,
        "remote_cached_tokens": 0,
        "token": token_of(token),
        "generation": GENERATION,
        "wire_version": 1,
        "prompt_index": 0,
        "choice_index": 0,
        **changes,
    }
    return {key: value for key, value in params.items() if value is not None}


def dispatch(*children: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Parameters of one Prefill dispatch."""
    top = {**children[0], "rendezvous_id": "rv", "x_request_id": "x", **changes}
    if len(children) > 1:
        top["batch_kv_transfer_params"] = {child["request_id"]: child for child in children}
    return top


def blocks(count: int, first: int = 100) -> tuple[list[int], list[int]]:
    """Block tables of two groups, main and indexer, told apart by their numbers."""
    return list(range(first, first + count)), list(range(first + 1000, first + 1000 + count))


def scheduled(
    request_id: str,
    computed: int,
    now: int,
    table: tuple[list[int], ...] | None = None,
    *,
    fresh: bool = False,
    prompt: int | None = None,
) -> ScheduledRequest:
    return ScheduledRequest(request_id, computed, now, table, fresh, prompt)


P = "cmpl-x-0-bbbbbbbb"
"""Prefill's engine request id for ``dispatch``."""


def prefill_half(
    control: RecordingControl | None = None,
    *,
    contract: Contract = CONTRACT,
    groups: CacheGroups = GROUPS,
    tp_size: int = 1,
    require_registered: bool = True,
    legacy_hosts: frozenset[str] = frozenset(),
    **times: Any,
) -> PrefillScheduler:
    rules = AdmissionRules(tp_size, contract.fingerprint(), require_registered, legacy_hosts)
    return PrefillScheduler(groups, contract, rules, control, **times)


def told(publication: Publication) -> tuple[str, int, list[int], list[int], bool]:
    return (
        publication.child.request_id,
        publication.start_block,
        list(publication.main_blocks),
        list(publication.indexer_blocks),
        publication.final,
    )


def refused(half: PrefillScheduler, control: RecordingControl, params: dict[str, Any], prompt: int = 16) -> str:
    """Why the only child of a request is refused; it is told so and so is the meta service, once."""
    half.track(P, params, prompt)
    step = half.step([scheduled(P, 0, prompt, blocks(1), fresh=True)], [])
    assert step.publications == []
    (failure,) = step.failures
    (report,) = control.failures
    assert report == ("rv", (failure.child.request_id,), failure.reason)
    return failure.reason
