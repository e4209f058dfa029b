"""Session strings of the host engine are hostile input, and prove one living process."""

import os
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rd2h.engines import proof
from rd2h.engines.proof import (
    MAX_SESSION_CHARS,
    PROOF_BYTES,
    PROOF_MAGIC,
    HostSession,
    ProcessIdentity,
    ProofPage,
    check_source,
)
from rd2h.errors import SessionError, StateError

sessions = st.builds(
    HostSession,
    machine=st.text("0123456789abcdef", min_size=32, max_size=32),
    pid_namespace=st.integers(0, 2**32 - 1),
    pid=st.integers(1, 2**22),
    start_ticks=st.integers(0, 2**64 - 1),
    proof_addr=st.integers(1, 2**64 - PROOF_BYTES),
    nonce=st.binary(min_size=16, max_size=16).filter(any),
)
GOOD = str(HostSession("0" * 31 + "a", 4026531836, 77, 12345, 0x7F00_0000_1000, bytes(range(16))))


@given(sessions)
def test_a_session_survives_its_text_form(session):
    text = str(session)
    assert len(text) <= MAX_SESSION_CHARS
    assert HostSession.parse(text) == session
    assert session.proof == PROOF_MAGIC + session.nonce


@given(sessions, st.integers(0, 191), st.sampled_from(string.printable + "٣\0é"), st.booleans())
def test_one_changed_character_is_refused_or_means_another_session(session, place, char, insert):
    text = str(session)
    place %= len(text)
    mutated = text[:place] + char + text[place if insert else place + 1 :]
    try:
        parsed = HostSession.parse(mutated)
    except SessionError:
        return
    assert str(parsed) == mutated  # one text for one session: nothing is accepted in two spellings


@given(st.text(max_size=400))
def test_arbitrary_text_never_does_anything_but_be_refused(text):
    with pytest.raises(SessionError):
        HostSession.parse(text)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("host:", "hosts:", "malformed"),
        (":77:", ":0:", "malformed"),
        (":77:", ":-1:", "malformed"),
        (":77:", ":077:", "malformed"),
        (":77:", ":4194305:", "pid 4194305"),
        (":12345:", ":18446744073709551616:", "does not fit 64 bits"),
        ("7f0000001000", "ffffffffffffffff", "beyond the address space"),
        ("7f0000001000", "0", "malformed"),
        (bytes(range(16)).hex(), "00" * 16, "all zero"),
        (bytes(range(16)).hex(), "00" * 15, "malformed"),
        (GOOD, GOOD + "\n", "malformed"),
        (GOOD, GOOD + ":" * 200, "at most 192"),
        (GOOD, "", "malformed"),
    ],
)
def test_malformed_sessions_name_what_is_wrong(old, new, why):
    assert old in GOOD
    with pytest.raises(SessionError, match=why):
        HostSession.parse(GOOD.replace(old, new))


def test_a_proof_page_proves_this_process_and_can_be_wiped():
    page = ProofPage()
    session = page.session
    assert session.pid == os.getpid()
    assert HostSession.parse(str(session)) == session
    check_source(session)
    held = (proof.ctypes.c_char * PROOF_BYTES).from_address(session.proof_addr)
    assert held.raw == session.proof
    page.wipe()
    assert held.raw == bytes(PROOF_BYTES)


def test_two_pages_have_different_nonces():
    assert ProofPage().session.nonce != ProofPage().session.nonce


def test_a_forked_child_cannot_publish_its_parents_session(monkeypatch):
    page = ProofPage()
    monkeypatch.setattr(proof.os, "getpid", lambda: page._owner_pid + 1)
    with pytest.raises(StateError, match="initialise an engine after the fork"):
        _ = page.session


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("machine", "f" * 32, "another machine or an earlier boot"),
        ("pid_namespace", 7, "PID namespace 7"),
        ("start_ticks", 1, "restarted or its process id reused"),
    ],
)
def test_a_session_of_another_place_or_time_is_refused(field, value, why):
    session = ProofPage().session
    changed = {name: getattr(session, name) for name in HostSession.__dataclass_fields__} | {field: value}
    with pytest.raises(SessionError, match=why):
        check_source(HostSession(**changed))


@pytest.mark.parametrize(
    ("identity", "why"),
    [
        (lambda ticks, uid: ProcessIdentity(ticks, (uid + 1,) * 3, False), "only from processes of its own user"),
        (lambda ticks, uid: ProcessIdentity(ticks, (uid, uid, uid + 1), False), "only from processes of its own user"),
        (lambda ticks, uid: ProcessIdentity(ticks, (uid,) * 3, True), "has ended"),
    ],
)
def test_foreign_and_dead_processes_are_refused(monkeypatch, identity, why):
    session = ProofPage().session
    found = identity(session.start_ticks, os.geteuid())
    monkeypatch.setattr(proof, "process_identity", lambda pid: found)
    with pytest.raises(SessionError, match=why):
        check_source(session)


def test_a_process_that_never_was_is_refused():
    with pytest.raises(SessionError, match="does not exist"):
        proof.process_identity(proof.MAX_PID)


def test_process_names_with_parentheses_do_not_shift_the_fields(tmp_path, monkeypatch):
    stat = "7 (a) b (c) S " + " ".join(str(number) for number in range(4, 53))
    files = {"/proc/7/stat": stat, "/proc/7/status": "Name:\ta) S\nUid:\t1\t2\t3\t4\n"}
    monkeypatch.setattr(proof.Path, "read_text", lambda self, **_: files[str(self)])
    assert proof.process_identity(7) == ProcessIdentity(22, (1, 2, 3), False)


def test_the_machine_id_has_a_fallback(monkeypatch):
    real = proof.machine_id()
    monkeypatch.setattr(proof.Path, "read_text", lambda self, **_: "garbage\n")
    assert proof.machine_id() != real
    assert len(proof.machine_id()) == 32
