"""A proxy's and a Decode's memory of their streams against the table itself, while streams break, the service restarts
and refuses for now: every operation is answered once, none is taken for applied that was not, every await concludes."""

import random
from collections import Counter, deque

import pytest
from meta_builders import child, kind
from rd2h_client.awaiting import ChildrenIterator
from rd2h_client.errors import MetaError, RendezvousEndedError
from rd2h_client.exchange_state import ExchangeState
from rd2h_client.operations import Withdrawal
from rd2h_client.v1.rendezvous_pb2 import (
    OUTCOME_ABORTED,
    OUTCOME_DONE,
    OUTCOME_FAILED,
    ExchangeRequest,
    ExchangeResponse,
    Operation,
    OperationResult,
    Outcome,
)
from rd2h_meta.errors import LimitError, MetaServiceError, NotYetError
from rd2h_meta.limits import RendezvousLimits
from rd2h_meta.rendezvous import RendezvousTable
from rd2h_meta.rendezvous_events import Event
from rd2h_meta.status import refusal_of

SEVERITY = (OUTCOME_DONE, OUTCOME_ABORTED, OUTCOME_FAILED)
PROXY, DECODE = "proxy", "decode"
STEPS = 400


class Stream:
    """One stream: what is on its way in either direction."""

    def __init__(self, subscriber: int) -> None:
        self.subscriber = subscriber
        self.up: deque[Operation] = deque()
        self.refusals: deque[OperationResult] = deque()
        self.events: deque[Event] = deque()
        self.down: deque[ExchangeResponse] = deque()
        self.done = 0


class World:
    """Two clients and a service, moved step by step."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.refuses = self.rng.choice([0.0, 0.1, 0.5])
        self.restarts = self.rng.random() < 0.5
        self.now_s = 0.0
        self.subscribers = 0
        self.clients = {name: ExchangeState(1_000, lambda rid, ended: None) for name in (PROXY, DECODE)}
        self.streams: dict[str, Stream] = {}
        self.applied: Counter[tuple[str, ...]] = Counter()
        self.outcomes: dict[tuple[str, ...], MetaError | None] = {}
        self.restart()

    def restart(self) -> None:
        self.streams.clear()
        self.table = RendezvousTable(RendezvousLimits(), self._emit)

    def connect(self, name: str) -> None:
        self.subscribers += 1
        self.streams[name] = Stream(self.subscribers)
        self.clients[name].reconnected(self.now_s)

    def disconnect(self, name: str) -> None:
        self.table.drop_subscriber(self.streams.pop(name).subscriber)

    def send(self, name: str) -> None:
        if (batch := self.clients[name].take_batch(self.now_s)) is not None:
            self.streams[name].up.extend(ExchangeRequest.FromString(batch.SerializeToString()).operations)

    def serve(self, name: str, most: int) -> None:
        stream = self.streams[name]
        for _ in range(min(most, len(stream.up))):
            operation = stream.up.popleft()
            try:
                if self.rng.random() < self.refuses:
                    raise self.rng.choice([LimitError("full", 0.3), NotYetError("drains")])
                self.applied[self._apply(operation, stream.subscriber)] += 1
            except MetaServiceError as error:
                stream.refusals.append(refusal_of(operation.op_id, error))
            stream.done += 1

    def answer(self, name: str, most: int) -> None:
        stream = self.streams[name]
        response = ExchangeResponse()
        for _ in range(min(most, len(stream.refusals))):
            response.results.append(stream.refusals.popleft())
        for _ in range(min(most, len(stream.events))):
            stream.events.popleft().write(response.events.add())
        if not stream.refusals:
            response.operations_done = stream.done
        stream.down.append(response)

    def receive(self, name: str) -> None:
        stream = self.streams[name]
        if stream.down:
            self.clients[name].receive(stream.down.popleft(), self.now_s)

    def pass_time(self, delta_s: float) -> None:
        self.now_s += delta_s
        for client in self.clients.values():
            client.wake(self.now_s)

    def step(self) -> None:
        """Something that can happen at any time."""
        rng, name = self.rng, self.rng.choice([PROXY, DECODE])
        chance = rng.random()
        if chance < 0.01 and self.restarts:
            self.restart()
        elif chance < 0.1:
            self.pass_time(rng.choice([0.01, 0.1, 0.3]))
        elif name not in self.streams:
            if chance < 0.4:
                self.connect(name)
        elif chance < 0.13:
            self.disconnect(name)
        else:
            move = rng.choice([self.send, self.receive, self.receive, self.serve, self.answer])
            if move in (self.serve, self.answer):
                move(name, rng.randint(1, 5))  # type: ignore[call-arg]
            else:
                move(name)  # type: ignore[call-arg]

    def settle(self) -> None:
        """From now on all goes well."""
        self.refuses = 0.0
        for _ in range(8):
            for name in self.clients:
                if name not in self.streams:
                    self.connect(name)
                self.send(name)
                self.serve(name, 1_000)
            for name in self.clients:
                self.answer(name, 1_000)
                while self.streams[name].down:
                    self.receive(name)
            self.pass_time(0.4)

    def told(self, key: tuple[str, ...]):  # type: ignore[no-untyped-def]
        def done(error: MetaError | None) -> None:
            assert key not in self.outcomes, f"{key} was answered twice"
            self.outcomes[key] = error
            assert error is not None or key[0] == "advertise" or self.applied[key], f"{key} was never applied"

        return done

    def _apply(self, operation: Operation, subscriber: int) -> tuple[str, ...]:
        if operation.HasField("advertise"):
            advert = operation.advertise
            self.table.advertise(advert.rendezvous_id, advert.child, 600.0, subscriber, self.now_s)
            return ("advertise", advert.child.request_id)
        if operation.HasField("withdraw"):
            self.table.withdraw(operation.withdraw, subscriber, self.now_s)
            return ("withdraw", operation.withdraw.request_id)
        wait = operation.await_children
        self.table.await_children(
            wait.rendezvous_id, wait.expected_children, 600.0, subscriber, self.now_s, wait.children_only
        )
        return ("await", wait.rendezvous_id)

    def _emit(self, subscriber: int, event: Event) -> None:
        for stream in self.streams.values():
            if stream.subscriber == subscriber:
                stream.events.append(event)


def plan(world: World, ends: dict[str, Outcome], waiting: dict[str, ChildrenIterator]) -> list[list[object]]:
    """What proxy and Decode will say: lists whose entries keep their order."""
    rng, plans = world.rng, []
    proxy, decode = world.clients[PROXY], world.clients[DECODE]

    def await_(rid: str, count: int) -> None:
        iterator = waiting[rid] = ChildrenIterator(rid, count, proxy.forget_await, None)  # type: ignore[arg-type]
        proxy.await_children(rid, count, 600.0, iterator, world.now_s + 605.0)

    def advertise(rid: str, name: str) -> None:
        far_s = world.now_s + 500.0
        decode.advertise(rid, child(name), far_s, far_s, world.told(("advertise", name)), rng.random() < 0.5)

    def withdraw(rid: str, name: str) -> None:
        withdrawal = Withdrawal(rid, name, ends[name], "why")
        decode.end(withdrawal, world.now_s, world.now_s + 500.0, world.told(("withdraw", name)))

    for number in range(rng.randint(1, 4)):
        rid, count = f"r{number}", rng.randint(1, 4)
        plans.append([(await_, rid, count)])
        for name in [f"{rid}c{index}" for index in range(count)]:
            ends[name] = rng.choice(SEVERITY)
            plans.append([(advertise, rid, name), (withdraw, rid, name)][rng.random() < 0.1 :])
    return plans


@pytest.mark.parametrize("first_seed", range(0, 600, 100))
def test_nothing_is_lost_doubled_or_invented(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 100):
        world = World(seed)
        ends: dict[str, Outcome] = {}
        waiting: dict[str, ChildrenIterator] = {}
        plans = plan(world, ends, waiting)
        steps = 0
        while plans or steps < STEPS:
            steps += 1
            if plans and world.rng.random() < 0.1:
                chosen = world.rng.choice(plans)
                say, *arguments = chosen.pop(0)  # type: ignore[misc]
                say(*arguments)
                plans = [entries for entries in plans if entries]
            world.step()
        world.settle()
        for rid, iterator in waiting.items():
            events = list(iterator._events)
            names = [kind(event).split()[0] for event in events]
            story = f"seed {seed}, {rid}: {[kind(event) for event in events]}, {iterator._error}"
            children = {name: end for name, end in ends.items() if name.startswith(rid)}
            told = [
                (event.child_ended.request_id, event.child_ended.outcome)
                for event in events
                if event.HasField("child_ended")
            ]
            assert sorted(told) == sorted(children.items()), story
            assert names.count("complete") == names.count("closed") == 1, story
            assert names[-1] == "closed", story
            assert events[-1].closed.outcome == max(children.values(), key=SEVERITY.index), story
        for name, client in world.clients.items():
            assert len(client.pending) == client.open_adverts == client.open_awaits == 0, f"seed {seed}, {name}"
        assert len(world.outcomes) >= len(ends), f"seed {seed}"
        for key, error in world.outcomes.items():
            assert error is None or (key[0] == "advertise" and isinstance(error, RendezvousEndedError)), (seed, key)
