"""The rendezvous core. Cases R3, R4, R5 and the order-independence of everything."""

import pytest
from meta_builders import DECODE, OTHER, PROXY, RendezvousBench, child
from rd2h_client.v1.rendezvous_pb2 import OUTCOME_ABORTED, OUTCOME_DONE, OUTCOME_FAILED, ExchangeRequest
from rd2h_meta.errors import ConflictError, EndedError, PreconditionError
from rd2h_meta.limits import RendezvousLimits
from rd2h_meta.rendezvous import NOBODY


class TestEitherSideFirst:
    def test_await_first(self) -> None:
        bench = RendezvousBench()
        bench.await_(2)
        assert bench.story(PROXY) == []
        bench.advertise("a")
        assert bench.story(PROXY) == ["advertised a"]
        bench.advertise("b")
        assert bench.story(PROXY) == ["advertised b", "complete 2"]

    def test_adverts_first(self) -> None:
        bench = RendezvousBench()
        bench.advertise("a", "b")
        bench.await_(2)
        assert bench.story(PROXY) == ["advertised a", "advertised b", "complete 2"]
        assert bench.story(DECODE) == []

    def test_in_between(self) -> None:
        bench = RendezvousBench()
        bench.advertise("a")
        bench.await_(2)
        bench.advertise("b")
        assert bench.story(PROXY) == ["advertised a", "advertised b", "complete 2"]

    def test_the_child_arrives_as_it_was_sent(self) -> None:
        bench = RendezvousBench()
        bench.await_(1)
        bench.advertise("a")
        assert bench.told[PROXY][0].advertised == child("a")


class TestIdempotence:
    def test_the_same_advert_again_says_nothing_and_extends_the_life(self) -> None:
        bench = RendezvousBench()
        bench.await_(2, ttl_s=1000.0)
        bench.advertise("a", ttl_s=10.0)
        bench.story(PROXY)
        bench.advertise("a", ttl_s=10.0, now_s=8.0)
        assert bench.story(PROXY) == []
        bench.table.expire(17.9)
        assert bench.story(PROXY) == []
        bench.table.expire(18.0)
        assert bench.story(PROXY) == ["ended a EXPIRED"]

    def test_another_token_for_the_same_name_is_a_conflict(self) -> None:
        bench = RendezvousBench()
        bench.advertise("a")
        with pytest.raises(ConflictError, match="'a' is already advertised in 'r' with another token"):
            bench.table.advertise("r", child("a", token=b"y" * 16), 0.0, DECODE, 0.0)

    def test_the_same_await_again_replays(self) -> None:
        bench = RendezvousBench()
        bench.await_(2)
        bench.advertise("a", "b")
        bench.story(PROXY)
        bench.await_(2, who=OTHER)
        assert bench.story(OTHER) == ["advertised a", "advertised b", "complete 2"]
        assert bench.story(PROXY) == []

    def test_another_expectation_is_refused_with_both_numbers(self) -> None:
        bench = RendezvousBench()
        bench.await_(2)
        with pytest.raises(PreconditionError, match=r"got 3, but 'r' is awaited already with 2"):
            bench.await_(3)

    def test_more_children_than_expected_are_refused(self) -> None:
        bench = RendezvousBench()
        bench.advertise("a", "b")
        with pytest.raises(PreconditionError, match=r"got 1, but 2 children"):
            bench.await_(1)
        bench.await_(2)
        with pytest.raises(PreconditionError, match="all 2 expected children"):
            bench.advertise("c")

    def test_ends_twice(self) -> None:
        bench = RendezvousBench()
        bench.await_(1)
        bench.advertise("a")
        bench.withdraw("a")
        bench.withdraw("a", OUTCOME_FAILED, "too late")
        bench.table.cancel("r", OUTCOME_ABORTED, "too late", 0.0)
        bench.table.report_failure("r", ["a"], "too late", 0.0)
        bench.table.report_failure("r", [], "too late", 0.0)
        assert bench.story(PROXY) == ["advertised a", "complete 1", "ended a DONE", "closed DONE"]
        assert bench.table.stats.totals() == {"advertised": 1, "children_done": 1, "rendezvous_done": 1}


class TestChildrenOnly:
    """Who counts the children itself is not told what follows from them."""

    def test_neither_that_they_are_complete_nor_that_all_have_ended(self) -> None:
        bench = RendezvousBench()
        bench.await_(2, children_only=True)
        bench.advertise("a", "b")
        bench.withdraw("a")
        bench.withdraw("b")
        assert bench.story(PROXY) == ["advertised a", "advertised b", "ended a DONE", "ended b DONE"]
        assert bench.table.open_count == 0

    def test_nor_by_a_replay(self) -> None:
        bench = RendezvousBench()
        bench.advertise("a")
        bench.await_(1, children_only=True)
        assert bench.story(PROXY) == ["advertised a"]

    @pytest.mark.parametrize("end", ["cancel", "failure", "time"])
    def test_other_ends_are_told(self, end: str) -> None:
        bench = RendezvousBench()
        bench.await_(2, ttl_s=10.0, children_only=True)
        bench.advertise("a", ttl_s=100.0)
        if end == "cancel":
            bench.table.cancel("r", OUTCOME_ABORTED, "left", 0.0)
        elif end == "failure":
            bench.table.report_failure("r", [], "prefill down", 0.0)
        else:
            bench.table.expire(10.0)
        told, last = bench.story(PROXY)
        assert (told, last.split()[0]) == ("advertised a", "closed")

    def test_one_who_does_not_count_is_told_everything(self) -> None:
        bench = RendezvousBench()
        bench.await_(1, children_only=True)
        bench.await_(1, who=OTHER)
        bench.advertise("a")
        bench.withdraw("a")
        everything = ["advertised a", "complete 1", "ended a DONE", "closed DONE"]
        assert bench.story(OTHER) == everything
        assert bench.story(PROXY) == everything


class TestEnds:
    def test_a_child_withdrawn_before_it_advertised_reaches_the_waiter(self) -> None:
        bench = RendezvousBench()
        bench.await_(2)
        bench.withdraw("a", OUTCOME_ABORTED, "client left")
        bench.advertise("b")
        assert bench.story(PROXY) == ["ended a ABORTED", "advertised b", "complete 1"]
        with pytest.raises(EndedError, match="client left") as refused:
            bench.advertise("a")
        assert refused.value.outcome == OUTCOME_ABORTED

    def test_also_when_the_waiter_comes_later(self) -> None:
        bench = RendezvousBench()
        bench.withdraw("a", OUTCOME_ABORTED, "client left")
        bench.advertise("b")
        bench.await_(2)
        events = bench.told[PROXY]
        assert (events[0].child_ended.prompt_index, events[0].child_ended.choice_index) == (3, 1)
        assert bench.story(PROXY) == ["ended a ABORTED", "advertised b", "complete 1"]

    def test_all_children_ended_before_the_waiter_came(self) -> None:
        bench = RendezvousBench()
        bench.withdraw("a", OUTCOME_ABORTED, "x")
        bench.await_(1)
        assert bench.story(PROXY) == ["ended a ABORTED", "complete 0", "closed ABORTED"]
        assert bench.table.open_count == 0

    def test_ends_like_its_worst_child(self) -> None:
        bench = RendezvousBench()
        bench.await_(3)
        bench.advertise("a", "b", "c")
        bench.withdraw("a", OUTCOME_ABORTED, "left")
        bench.withdraw("b", OUTCOME_FAILED, "no blocks")
        bench.withdraw("c")
        closed = bench.told[PROXY][-1].closed
        assert (closed.outcome, closed.reason) == (OUTCOME_FAILED, "no blocks")

    def test_the_indices_of_an_ended_child_are_those_it_advertised(self) -> None:
        bench = RendezvousBench()
        bench.await_(2)
        bench.table.advertise("r", child("a", prompt_index=7, choice_index=2), 0.0, DECODE, 0.0)
        bench.withdraw("a")
        ended = bench.told[PROXY][-1].child_ended
        assert (ended.prompt_index, ended.choice_index) == (7, 2)

    def test_who_withdraws_is_not_told_but_other_advertisers_are(self) -> None:
        bench = RendezvousBench()
        bench.advertise("a")
        bench.withdraw("a")
        assert bench.story(DECODE) == []
        bench.advertise("b")
        bench.withdraw("b", OUTCOME_ABORTED, who=OTHER)
        assert bench.story(DECODE) == ["ended b ABORTED"]

    def test_cancel_tells_waiters_and_advertisers(self) -> None:
        bench = RendezvousBench()
        bench.await_(2)
        bench.advertise("a")
        bench.story(PROXY)
        bench.table.cancel("r", OUTCOME_ABORTED, "client went away", 0.0)
        assert bench.story(PROXY) == ["closed ABORTED"]
        assert bench.told[DECODE][0].child_ended.reason == "client went away"
        with pytest.raises(EndedError, match="client went away"):
            bench.advertise("b")

    def test_cancel_before_anybody_came_is_remembered(self) -> None:
        bench = RendezvousBench()
        bench.table.cancel("r", 0, "gone", 0.0)
        with pytest.raises(EndedError) as refused:
            bench.advertise("a")
        assert refused.value.outcome == OUTCOME_ABORTED
        bench.await_(1)
        assert bench.story(PROXY) == ["closed ABORTED"]

    def test_cancel_with_done(self) -> None:
        bench = RendezvousBench()
        bench.await_(1)
        bench.advertise("a")
        bench.table.cancel("r", OUTCOME_DONE, "", 0.0)
        assert bench.story(DECODE) == ["ended a DONE"]
        assert not bench.table.stats.failures

    def test_failure_of_prefill_after_adverts_reaches_decode_at_once(self) -> None:
        bench = RendezvousBench()
        bench.await_(2)
        bench.advertise("a", "b")
        bench.table.report_failure("r", ["a", "a"], "prefill 500", 0.0)
        assert bench.story(DECODE) == ["ended a FAILED"]
        assert bench.story(PROXY) == ["advertised a", "advertised b", "complete 2", "ended a FAILED"]
        bench.table.report_failure("r", ["b"], "prefill 500", 0.0)
        assert bench.story(PROXY) == ["ended b FAILED", "closed FAILED"]

    def test_failure_of_prefill_before_adverts_reaches_decode_on_arrival(self) -> None:
        bench = RendezvousBench()
        bench.table.report_failure("r", [], "prefill down", 0.0)
        with pytest.raises(EndedError, match="prefill down") as refused:
            bench.advertise("a")
        assert refused.value.outcome == OUTCOME_FAILED
        bench.table.report_failure("s", ["a"], "one child", 0.0)
        with pytest.raises(EndedError, match="one child"):
            bench.advertise("a", rid="s")
        bench.advertise("b", rid="s")

    def test_recent_failures_name_rendezvous_child_and_reason(self) -> None:
        bench = RendezvousBench(RendezvousLimits(recent_failures=2))
        for number in range(3):
            bench.table.report_failure(f"r{number}", ["a"], f"why {number}", 0.0)
        failures = [(entry.rendezvous_id, entry.request_id, entry.reason) for entry in bench.table.stats.failures]
        assert failures == [("r2", "a", "why 2"), ("r1", "a", "why 1")]


class TestTime:
    def test_a_rendezvous_expires_for_everybody(self) -> None:
        bench = RendezvousBench()
        bench.await_(2, ttl_s=10.0)
        bench.advertise("a", ttl_s=100.0)
        bench.story(PROXY)
        bench.table.expire(9.9)
        assert bench.story(PROXY) == []
        bench.table.expire(10.0)
        assert bench.story(PROXY) == ["closed EXPIRED"]
        assert bench.story(DECODE) == ["ended a EXPIRED"]
        assert (bench.table.open_count, bench.table.live_children) == (0, 0)

    def test_a_child_may_expire_alone(self) -> None:
        bench = RendezvousBench()
        bench.await_(2, ttl_s=100.0)
        bench.advertise("a", ttl_s=5.0)
        bench.advertise("b", ttl_s=50.0)
        bench.story(PROXY)
        bench.table.expire(5.0)
        assert bench.story(PROXY) == ["ended a EXPIRED"]
        assert bench.story(DECODE) == ["ended a EXPIRED"]
        bench.table.expire(50.0)
        assert bench.story(PROXY) == ["ended b EXPIRED", "closed EXPIRED"]

    def test_unawaited_adverts_live_as_long_as_the_longest(self) -> None:
        bench = RendezvousBench()
        bench.advertise("a", ttl_s=5.0)
        bench.advertise("b", ttl_s=20.0)
        bench.table.expire(10.0)
        assert bench.table.live_children == 1
        bench.await_(2, now_s=10.0)
        assert bench.story(PROXY) == ["ended a EXPIRED", "advertised b", "complete 1"]
        bench2 = RendezvousBench()
        bench2.advertise("a", ttl_s=5.0)
        bench2.table.expire(5.0)
        assert bench2.table.open_count == 0

    def test_the_first_await_sets_the_life_and_later_ones_extend_it(self) -> None:
        bench = RendezvousBench()
        bench.advertise("a", ttl_s=500.0)
        bench.await_(1, ttl_s=10.0)
        bench.await_(1, ttl_s=10.0, now_s=5.0)
        bench.story(PROXY)
        bench.table.expire(14.9)
        assert bench.story(PROXY) == []
        bench.table.expire(15.0)
        assert bench.story(PROXY) == ["closed EXPIRED"]

    def test_a_pause_of_the_service_does_not_count(self) -> None:
        bench = RendezvousBench()
        bench.await_(1, ttl_s=10.0)
        bench.advertise("a", ttl_s=10.0)
        bench.story(PROXY)
        bench.table.shift_deadlines(100.0)
        bench.table.expire(109.0)
        assert bench.story(PROXY) == []
        bench.table.expire(110.0)
        assert bench.story(PROXY) == ["closed EXPIRED"]

    def test_the_memory_ends(self) -> None:
        bench = RendezvousBench(RendezvousLimits(memory_s=10.0))
        bench.table.cancel("r", OUTCOME_ABORTED, "x", 0.0)
        bench.table.expire(9.9)
        assert bench.table.remembered_count == 1
        bench.table.expire(10.0)
        assert bench.table.remembered_count == 0
        bench.advertise("a", now_s=10.0)

    def test_lives_are_clamped(self) -> None:
        bench = RendezvousBench(RendezvousLimits(min_ttl_s=1.0, max_ttl_s=100.0, default_ttl_s=50.0))
        for rid, ttl_s in (("short", 0.001), ("long", 1e6), ("default", 0.0)):
            bench.await_(1, rid=rid, ttl_s=ttl_s)
        for now_s, left in ((0.9, 3), (1.0, 2), (49.9, 2), (50.0, 1), (99.9, 1), (100.0, 0)):
            bench.table.expire(now_s)
            assert bench.table.open_count == left


class TestStreamsThatEnd:
    def test_a_lost_waiter_gets_nothing_more_and_may_come_back(self) -> None:
        bench = RendezvousBench()
        bench.await_(1)
        bench.table.drop_subscriber(PROXY)
        bench.table.drop_subscriber(PROXY)
        assert bench.table.waiter_count == 0
        bench.advertise("a")
        assert bench.story(PROXY) == []
        bench.await_(1, who=OTHER)
        assert bench.story(OTHER) == ["advertised a", "complete 1"]

    def test_an_advertiser_that_came_back_on_another_stream_is_told_there(self) -> None:
        bench = RendezvousBench()
        bench.advertise("a", who=DECODE)
        bench.advertise("a", who=OTHER)
        bench.table.cancel("r", OUTCOME_ABORTED, "x", 0.0)
        assert bench.story(DECODE) == []
        assert bench.story(OTHER) == ["ended a ABORTED"]

    def test_a_unary_advertiser_is_not_told(self) -> None:
        bench = RendezvousBench()
        bench.advertise("a", who=NOBODY)
        bench.table.cancel("r", OUTCOME_ABORTED, "x", 0.0)
        assert bench.told == {}

    def test_a_stream_that_waits_and_advertises_gets_every_event_once(self) -> None:
        bench = RendezvousBench()
        bench.await_(2, who=DECODE)
        bench.advertise("a", "b")
        bench.withdraw("a", OUTCOME_ABORTED, who=OTHER)
        assert bench.story(DECODE) == ["advertised a", "advertised b", "complete 2", "ended a ABORTED"]


def test_a_child_does_not_hold_the_message_that_brought_it() -> None:
    bench = RendezvousBench()
    message = ExchangeRequest()
    advert = message.operations.add().advertise
    advert.child.CopyFrom(child("a"))
    bench.table.advertise("r", advert.child, 0.0, DECODE, 0.0)
    # A part of a message keeps the whole of it in memory: up to 4 MiB for each live child.
    advert.child.host = "10.9.9.9"
    bench.await_(1, children_only=True)
    (told,) = bench.told[PROXY]
    assert told.advertised == child("a")
