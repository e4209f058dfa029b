"""Long reads of a connection overlap; they are still begun, finished and answered in the order of their messages."""

import random

import pytest
from core_pull import LAYERS, PEER, PREFILL, Pull

from rd2h.children import Outcome
from rd2h.decode.planner import OVERLAP_FROM_S
from rd2h.decode.router import Received
from rd2h.decode.steps import Answer, ReadTask, Turn
from rd2h.engines import READ_OK, ReadResult
from rd2h.layout import encode_layer_map
from rd2h.wire import PeerInfo, ReadDone, ReadFailed, encode_mf_meta


def slow_pull(block_bytes: int = 5 << 20) -> Pull:
    """A connection whose last read took long; its blocks are too large to be read together."""
    pull = Pull(block_bytes)
    pull.connection.read_s = OVERLAP_FROM_S
    return pull


def test_two_reads_run_at_a_time_and_answers_keep_their_order() -> None:
    pull = slow_pull()
    for layer in range(4):
        pull.ready(layer)
    first, second = pull.read(), pull.read()
    assert (first.turn, second.turn) == (Turn.PASSED_ON, Turn.GIVEN_UP)
    assert pull.step() is None, "two are running"
    assert pull.returned(second)
    assert pull.step() is None, "the first has not returned: no answer yet, and no third read"
    assert pull.returned(first)
    assert pull.replies(pull.step()) == [ReadDone(0, 100)]
    assert pull.replies(pull.step()) == [ReadDone(1, 101)]
    assert [layer.layer_idx for layer in pull.read().layers] == [2]


def test_a_message_that_comes_during_a_read_is_begun_at_once() -> None:
    pull = slow_pull()
    pull.ready(0)
    first = pull.read()
    assert first.turn is Turn.GIVEN_UP
    pull.ready(1)
    second = pull.read()
    assert second.turn is Turn.GIVEN_UP
    pull.ready(2)
    assert not pull.connection.busy, "no thread is bothered while two reads run"
    assert pull.returned(first)
    assert pull.replies(pull.step()) == [ReadDone(0, 100)]
    assert [layer.layer_idx for layer in pull.read().layers] == [2]


def test_who_has_the_turn_finds_what_returned_meanwhile() -> None:
    pull = slow_pull()
    pull.ready(0)
    first = pull.read()
    pull.ready(1)
    assert pull.connection.busy
    assert not pull.returned(first), "another thread has the turn"
    assert pull.replies(pull.step()) == [ReadDone(0, 100)]
    assert isinstance(pull.step(), ReadTask)


def test_an_error_of_one_read_leaves_the_other_its_own_answer() -> None:
    pull = slow_pull()
    pull.ready(0)
    pull.ready(1)
    first, second = pull.read(), pull.read()
    pull.returned(first, ReadResult(5, "broken"))
    assert pull.replies(pull.step()) == [ReadFailed(0, "broken", 100)]
    assert pull.step() is None
    assert pull.book.take_finished(100.0) == [], "the second read may still write into the blocks"
    pull.returned(second)
    assert pull.replies(pull.step()) == [ReadDone(1, 101)]
    (report,) = pull.book.take_finished(100.0)
    assert report.outcome is Outcome.FAILED


@pytest.mark.parametrize("what", ["refused layer", "metadata"])
def test_what_is_answered_without_a_read_waits_for_the_reads_before_it(what: str) -> None:
    pull = slow_pull()
    pull.ready(0)
    first = pull.read()
    if what == "refused layer":
        pull.ready(1, name="no such layer")
    else:
        meta = encode_mf_meta("session", encode_layer_map(pull.source), PeerInfo(1, PREFILL, b"", 1, 0))
        pull.book.accept(Received(PEER, meta), 0.0, 1)
    assert pull.step() is None
    assert pull.returned(first)
    assert pull.replies(pull.step()) == [ReadDone(0, 100)]
    step = pull.step()
    assert isinstance(step, Answer)
    if what == "metadata":
        assert step.open_session == "session"
    else:
        assert isinstance(pull.replies(step)[0], ReadFailed)


def test_an_abort_waits_for_both_reads() -> None:
    pull = slow_pull()
    pull.ready(0)
    pull.ready(1)
    first, second = pull.read(), pull.read()
    pull.book.abort(["request"], 0.0)
    for task in (second, first):
        assert pull.book.take_finished(0.0) == []
        pull.returned(task)
        while pull.step() is not None:
            pass
    (report,) = pull.book.take_finished(0.0)
    assert report.outcome is Outcome.ABORTED


def test_a_connection_gets_a_second_thread_only_while_half_of_them_are_free() -> None:
    pull = slow_pull()
    table = pull.book._table
    elsewhere = table.begin_read([])
    for layer in range(3):
        pull.ready(layer)
    first = pull.read()
    assert first.turn is Turn.GIVEN_UP, "two of four threads read: nobody else is asked to read this connection"
    assert pull.step() is None
    pull.returned(first)
    assert pull.replies(pull.step()) == [ReadDone(0, 100)]
    second = pull.read()
    table.end_read(elsewhere, 0.0)
    pull.ready(3)
    assert pull.connection.busy, "a thread looks at it when something comes"
    third = pull.read()
    assert [layer.layer_idx for layer in third.layers] == [2]
    pull.returned(second)
    assert pull.replies(pull.step()) == [ReadDone(1, 101)]


def test_short_reads_keep_the_turn() -> None:
    pull = slow_pull()
    pull.connection.read_s = OVERLAP_FROM_S / 2
    pull.ready(0)
    pull.ready(1)
    assert pull.read().turn is Turn.KEPT


@pytest.mark.parametrize("seed", range(100))
def test_any_interleaving_answers_every_layer_once_in_order(seed: int) -> None:
    """Messages come, turns are taken, reads return, in any order; no turn is lost, none is given twice."""
    source = random.Random(seed)
    pull = slow_pull()
    connection = pull.connection
    sent, answered, running = 0, [], []
    turns = 0  # threads that have the turn now
    queued = 0  # turns that were passed on and not taken
    while len(answered) < LAYERS:
        actions = []
        if sent < LAYERS:
            actions.append("message")
        if turns:
            actions.append("step")
        if queued:
            actions.append("take")
        actions += ["return"] * len(running)
        assert actions, "nothing can go on: a turn was lost"
        action = source.choice(actions)
        if action == "message":
            was_busy = connection.busy
            pull.ready(sent, last=sent == LAYERS - 1)
            sent += 1
            turns += connection.busy and not was_busy
        elif action == "take":
            queued, turns = queued - 1, turns + 1
        elif action == "step":
            step = pull.step()
            if step is None:
                turns -= 1
            elif isinstance(step, Answer):
                answered += pull.replies(step)
            elif step.turn is Turn.KEPT:
                answered += pull.finish(step)
            else:
                turns -= 1
                queued += step.turn is Turn.PASSED_ON
                running.append(step)
        else:
            task = running.pop(source.randrange(len(running)))
            seconds = source.choice((0.0, OVERLAP_FROM_S))
            turns += pull.returned(task, READ_OK, seconds)
        assert turns + queued <= 1
        assert len(running) <= 2
    assert answered == [ReadDone(layer, 100 + layer) for layer in range(LAYERS)]
    (report,) = pull.book.take_finished(0.0)
    assert report.outcome is Outcome.DONE
    assert pull.book.counts() == (0, 0, 0)
