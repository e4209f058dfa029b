"""State machine over a whole rendezvous plane: two clients, a network that breaks, a service that restarts.

Whatever the order: the proxy sees every child once and its end once, nobody waits for something that has happened,
and Decode learns the end of every child that it advertised.
"""

import asyncio
from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from meta_builders import as_message, child, kind
from rd2h_client.awaiting import ChildrenIterator
from rd2h_client.errors import MetaError, RendezvousEndedError
from rd2h_client.exchange_state import ExchangeState
from rd2h_client.operations import Cancellation, FailureReport, Withdrawal
from rd2h_client.v1.rendezvous_pb2 import (
    OUTCOME_ABORTED,
    OUTCOME_DONE,
    ChildEnded,
    ExchangeRequest,
    ExchangeResponse,
    Operation,
    OperationResult,
)
from rd2h_meta.errors import EndedError, MetaServiceError
from rd2h_meta.limits import RendezvousLimits
from rd2h_meta.rendezvous import RendezvousTable
from rd2h_meta.rendezvous_events import Event

LONG_S = 100_000.0
RENDEZVOUS = st.sampled_from(["r0", "r1"])
CHILDREN = st.sampled_from(["c0", "c1"])
SELDOM = st.integers(0, 4).map(lambda number: number == 4)
EXPECTED = 2


class Link:
    """One client's stream: what is on its way to the service, and what the service has written."""

    def __init__(self, on_child_ended) -> None:  # type: ignore[no-untyped-def]
        self.state = ExchangeState(1_000, on_child_ended)
        self.subscriber = 0  # 0: no stream
        self.done = 0  # operations of the present stream that the service has applied or refused
        self.up: deque[ExchangeRequest] = deque()
        self.down: deque[ExchangeResponse] = deque()


class PlaneMachine(RuleBasedStateMachine):
    """One service, a proxy and a Decode engine."""

    @initialize()
    def begin(self) -> None:
        self.now_s = 0.0
        self.loop = asyncio.new_event_loop()  # never run: the iterators are read without waiting
        self.runs = 0
        self.last_subscriber = 0
        self.notices: dict[tuple[str, str], ChildEnded | str] = {}
        self.proxy = Link(lambda rid, ended: None)
        self.decode = Link(self.decode_told)
        self.awaits: dict[str, ChildrenIterator] = {}
        self.seen: dict[str, list[str]] = {}
        self.advertised: set[tuple[str, str]] = set()
        self.withdrawn: set[tuple[str, str]] = set()
        self.cancelled: set[str] = set()
        self.start_service()

    def decode_told(self, rid: str, ended: ChildEnded) -> None:
        assert (rid, ended.request_id) not in self.notices
        self.notices[rid, ended.request_id] = ended

    def start_service(self) -> None:
        self.runs += 1
        self.service_id = f"run-{self.runs}"
        limits = RendezvousLimits(default_ttl_s=LONG_S, max_ttl_s=LONG_S, memory_s=LONG_S)
        self.table = RendezvousTable(limits, self.emit)
        for link in (self.proxy, self.decode):
            link.subscriber = 0
            link.up.clear()
            link.down.clear()

    def emit(self, subscriber: int, event: Event) -> None:
        for link in (self.proxy, self.decode):
            if link.subscriber == subscriber:
                link.down.append(ExchangeResponse(events=[as_message(event)]))

    # What the clients do.

    @rule(rid=RENDEZVOUS)
    def proxy_awaits(self, rid: str) -> None:
        if rid in self.awaits:
            return
        iterator = ChildrenIterator(rid, EXPECTED, self.proxy.state.forget_await, self.loop)
        self.awaits[rid] = iterator
        self.seen[rid] = []
        self.proxy.state.await_children(rid, EXPECTED, LONG_S, iterator, LONG_S)

    @rule(rid=RENDEZVOUS, name=CHILDREN)
    def decode_advertises(self, rid: str, name: str) -> None:
        key = (rid, name)
        if key in self.advertised or key in self.withdrawn:
            return
        self.advertised.add(key)

        def done(error: MetaError | None) -> None:
            if error is not None:
                assert isinstance(error, RendezvousEndedError)
                assert key not in self.notices
                self.notices[key] = error.message

        self.decode.state.advertise(rid, child(name), LONG_S, LONG_S, done)

    @rule(rid=RENDEZVOUS, name=CHILDREN, outcome=st.sampled_from([OUTCOME_DONE, OUTCOME_ABORTED]))
    def decode_withdraws(self, rid: str, name: str, outcome: int) -> None:
        if (rid, name) in self.withdrawn:
            return
        self.withdrawn.add((rid, name))
        self.decode.state.end(Withdrawal(rid, name, outcome), self.now_s, LONG_S, must_succeed)

    @rule(rid=RENDEZVOUS, seldom=SELDOM)
    def proxy_cancels(self, rid: str, seldom: bool) -> None:
        if not seldom:
            return
        self.cancelled.add(rid)
        self.proxy.state.end(Cancellation(rid, "left", OUTCOME_ABORTED), self.now_s, LONG_S, must_succeed)

    @rule(rid=RENDEZVOUS, seldom=SELDOM)
    def proxy_reports_failure(self, rid: str, seldom: bool) -> None:
        if not seldom:
            return
        self.cancelled.add(rid)
        self.proxy.state.end(FailureReport(rid, "prefill down"), self.now_s, LONG_S, must_succeed)

    # What the network does.

    @rule(proxy=st.booleans(), step=st.sampled_from(["connects", "breaks", "sends", "applies", "receives", "flushes"]))
    def network(self, proxy: bool, step: str) -> None:
        if step == "connects":
            self.connects(proxy)
        elif step == "breaks":
            self.breaks(proxy)
        elif step == "flushes":
            self.flush(proxy)
        else:
            self.connects(proxy)
            steps = {"sends": self.client_sends, "applies": self.service_applies, "receives": self.client_receives}
            steps[step](proxy)

    @rule(proxy=st.booleans())
    def reconnects(self, proxy: bool) -> None:
        self.flush(proxy)
        self.breaks(proxy)
        self.flush(proxy)

    def flush(self, proxy: bool) -> None:
        self.connects(proxy)
        link = self.proxy if proxy else self.decode
        for _ in range(20):
            self.client_sends(proxy)
            self.service_applies(proxy)
            while link.down:
                self.client_receives(proxy)

    def connects(self, proxy: bool) -> None:
        link = self.proxy if proxy else self.decode
        if link.subscriber:
            return
        self.last_subscriber += 1
        link.subscriber = self.last_subscriber
        link.done = 0
        link.state.receive(ExchangeResponse(service_id=self.service_id), self.now_s)
        link.state.reconnected(self.now_s)

    def breaks(self, proxy: bool) -> None:
        link = self.proxy if proxy else self.decode
        if link.subscriber:
            self.table.drop_subscriber(link.subscriber)
            link.subscriber = 0
            link.up.clear()
            link.down.clear()

    def client_sends(self, proxy: bool) -> None:
        link = self.proxy if proxy else self.decode
        if link.subscriber and (batch := link.state.take_batch(self.now_s)) is not None:
            link.up.append(ExchangeRequest.FromString(batch.SerializeToString()))

    def service_applies(self, proxy: bool) -> None:
        link = self.proxy if proxy else self.decode
        if link.up:
            for operation in link.up.popleft().operations:
                response = self.apply(operation, link.subscriber)
                link.done += 1
                response.operations_done = link.done
                link.down.append(response)

    def client_receives(self, proxy: bool) -> None:
        link = self.proxy if proxy else self.decode
        if link.down:
            link.state.receive(link.down.popleft(), self.now_s)
            self.look()

    @precondition(lambda self: self.runs < 4)
    @rule(seldom=SELDOM)
    def the_service_restarts(self, seldom: bool) -> None:
        if seldom:
            self.start_service()

    def apply(self, operation: Operation, subscriber: int) -> ExchangeResponse:
        name = operation.WhichOneof("op")
        request = getattr(operation, name)
        rid = request.rendezvous_id
        try:
            if name == "advertise":
                self.table.advertise(rid, request.child, 0.0, subscriber, self.now_s)
            elif name == "await_children":
                self.table.await_children(
                    rid, request.expected_children, 0.0, subscriber, self.now_s, request.children_only
                )
            elif name == "cancel":
                self.table.cancel(rid, request.outcome, request.reason, self.now_s)
            elif name == "withdraw":
                self.table.withdraw(request, subscriber, self.now_s)
            else:
                self.table.report_failure(rid, request.request_ids, request.reason, self.now_s)
        except EndedError as error:
            result = OperationResult(
                op_id=operation.op_id, code=error.code, message=error.message, outcome=error.outcome
            )
            return ExchangeResponse(results=[result])
        except MetaServiceError as error:
            raise AssertionError(f"{name} refused: {error}") from error
        return ExchangeResponse()

    def look(self) -> None:
        for rid, iterator in self.awaits.items():
            while iterator._events:
                self.seen[rid].append(kind(iterator._events.popleft()))

    @invariant()
    def the_proxy_sees_nothing_twice_and_nothing_after_the_end(self) -> None:
        for story in self.seen.values():
            assert len(story) == len(set(story))
            heads = [line.rsplit(" ", 1)[0] for line in story if line.startswith("ended")]
            assert len(heads) == len(set(heads))
            assert sum(line.startswith("closed") for line in story[:-1]) == 0
            assert sum(line.startswith("complete") for line in story) <= 1

    def teardown(self) -> None:
        """Everything comes back and is delivered; then everybody knows the truth."""
        if not hasattr(self, "runs"):
            return
        self.loop.close()
        for proxy in (True, False, True, False):
            self.flush(proxy)
        for link in (self.proxy, self.decode):
            assert (len(link.up), len(link.down)) == (0, 0)
            assert len(link.state.pending) == 0
        for rid, story in self.seen.items():
            self.check_story(rid, story)
        for rid, name in self.advertised - self.withdrawn:
            # An advert is either still open at Decode, or Decode was told how it ended.
            assert ((rid, name) in self.notices) == (rid in self.cancelled)
        open_adverts = {key for key in self.advertised - self.withdrawn if key[0] not in self.cancelled}
        assert self.decode.state.open_adverts == len(open_adverts)

    def check_story(self, rid: str, story: list[str]) -> None:
        closed = bool(story) and story[-1].startswith("closed")
        all_ended = all((rid, name) in self.withdrawn for name in ("c0", "c1"))
        assert closed == (rid in self.cancelled or all_ended), (story, self.cancelled, self.withdrawn)
        if closed:
            return
        for name in ("c0", "c1"):
            if (rid, name) in self.withdrawn:
                assert any(line.startswith(f"ended {name}") for line in story)
            elif (rid, name) in self.advertised:
                assert f"advertised {name}" in story
        known = self.advertised | self.withdrawn
        complete = all((rid, name) in known for name in ("c0", "c1"))
        assert any(line.startswith("complete") for line in story) == complete


def must_succeed(error: MetaError | None) -> None:
    assert error is None


TestPlaneMachine = PlaneMachine.TestCase
TestPlaneMachine.settings = settings(max_examples=250, stateful_step_count=50, deadline=None)
