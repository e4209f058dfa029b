"""``kv_transfer_params`` under arbitrary clients, and the place of a request id."""

from typing import Any

import pytest
from connector_standins import child_params, dispatch
from hypothesis import given
from hypothesis import strategies as st

from rd2h.errors import RequestError
from rd2h.params import (
    MAX_CHILDREN,
    RemoteDecodes,
    external_id,
    parse_remote_decodes,
    parse_remote_prefill,
    place_of,
)

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40) | st.binary(max_size=8)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=20), inner, max_size=3)
)
KEYS = sorted({*child_params(), "layout_fingerprint", "prompt_tokens", "batch_kv_transfer_params", "x_request_id"})


@given(st.dictionaries(st.sampled_from(KEYS), JSON), st.booleans())
def test_any_parameters_parse_or_are_refused(changes: dict[str, Any], from_good: bool) -> None:
    """No exception, whatever a client sends; and what passes is within its bounds."""
    params = {**(dispatch(child_params()) if from_good else {}), **changes}
    remote = parse_remote_decodes(params)
    assert remote.children or remote.broken
    reachable = [broken.reachable for broken in remote.broken if broken.reachable is not None]
    assert not any(child.legacy for child in reachable)
    for child in (*remote.children, *reachable):
        assert 1 <= child.base_port <= 65535
        assert child.tp_size >= 1
        assert child.cached_tokens >= 0
        assert (child.token is None) == (child.generation is None) == child.legacy
        assert child.token is None or len(child.token) == 16
        assert 0 < len(child.host) <= 256


@given(st.dictionaries(st.sampled_from(["rendezvous_id", "x_request_id", "metaserver", "do_remote_prefill"]), JSON))
def test_any_decode_parameters_parse_or_are_refused(params: dict[str, Any]) -> None:
    try:
        remote = parse_remote_prefill(params)
    except RequestError:
        return
    assert (remote.rendezvous_id, remote.x_request_id) == (params["rendezvous_id"], params["x_request_id"])


@given(
    st.text(min_size=1, max_size=30),
    st.integers(0, 999_999),
    st.integers(0, 999_999),
    st.booleans(),
    st.booleans(),
    st.text("0123456789abcdef", min_size=8, max_size=8),
)
def test_place_of_every_id_that_vllm_makes(
    x: str, prompt: int, choice: int, several: bool, chat: bool, suffix: str
) -> None:
    """For any id that a proxy chooses, with n>1 or not, with the random suffix or without."""
    for end in ("", f"-{suffix}"):
        front = f"{choice}_" if several else ""
        request_id = f"{front}chatcmpl-{x}{end}" if chat else f"{front}cmpl-{x}-{prompt}{end}"
        assert place_of(request_id, x) == (0 if chat else prompt, choice if several else 0)


@given(st.text(max_size=60), st.text(min_size=1, max_size=20))
def test_place_of_anything_is_found_or_refused(request_id: str, x: str) -> None:
    try:
        prompt, choice = place_of(request_id, x)
    except RequestError:
        return
    assert prompt >= 0
    assert choice >= 0


@pytest.mark.parametrize(
    "request_id",
    [
        *("", "x", "cmpl-x", "cmpl-x-", "cmpl-x-a", "cmpl-x-0-", "cmpl-x-0-AAAAAAAA", "cmpl-x-0-aaaaaaaaa"),
        *("acmpl-x-0", "_cmpl-x-0", "a_cmpl-x-0", "-1_cmpl-x-0", "chatcmpl-x-0", "chatcmpl-xy", "cmpl-x-0\n"),
        "cmpl-x-1234567",
    ],
)
def test_other_ids_are_refused(request_id: str) -> None:
    with pytest.raises(RequestError, match="does not come from x_request_id"):
        place_of(request_id, "x")


@pytest.mark.parametrize(
    ("request_id", "external"),
    [
        ("cmpl-x-0-aaaaaaaa", "cmpl-x-0"),
        ("1_cmpl-x-0-aaaaaaaa", "1_cmpl-x-0"),
        ("cmpl-x-0", "cmpl-x-0"),
        ("chatcmpl-x-01234567", "chatcmpl-x"),
        ("-aaaaaaaa", "-aaaaaaaa"),
        ("cmpl-x-0-AAAAAAAA", "cmpl-x-0-AAAAAAAA"),
    ],
)
def test_external_id_is_without_the_random_suffix(request_id: str, external: str) -> None:
    assert external_id(request_id) == external


def test_batch_and_single_child() -> None:
    single = parse_remote_decodes(dispatch(child_params("a")))
    assert [child.request_id for child in single.children] == ["a"]
    batch = parse_remote_decodes(dispatch(child_params("a", 1), child_params("b", 2, prompt_index=1)))
    assert [child.request_id for child in batch.children] == ["a", "b"]
    assert [child.request_id for child in batch.of_prompt("cmpl-x-1-aaaaaaaa")] == ["b"]
    with pytest.raises(RequestError, match="no entry of batch_kv_transfer_params has prompt_index 7"):
        batch.of_prompt("cmpl-x-7")


def test_too_many_children() -> None:
    many = {str(i): child_params(str(i)) for i in range(MAX_CHILDREN + 1)}
    remote = parse_remote_decodes({**dispatch(child_params()), "batch_kv_transfer_params": many})
    assert (remote.children, remote.rendezvous_id) == ((), "rv")
    (broken,) = remote.broken
    assert (broken.request_id, broken.reachable) == ("", None)
    assert "1..16384 children" in broken.reason


def test_one_malformed_child_of_a_batch_is_named_and_its_siblings_are_good() -> None:
    remote = parse_remote_decodes(dispatch(child_params("a", 1), child_params("b", 2, remote_port=0)))
    assert [child.request_id for child in remote.children] == ["a"]
    (broken,) = remote.broken
    assert (broken.request_id, broken.reachable) == ("b", None)
    assert "remote_port must be a whole number" in broken.reason


def test_a_broken_child_can_be_reached_where_address_and_token_are_good() -> None:
    (broken,) = parse_remote_decodes(dispatch(child_params("a", 1, prompt_index=-1))).broken
    assert broken.reachable is not None
    child = broken.reachable
    assert (child.request_id, child.host, child.base_port, child.generation) == ("a", "10.0.0.2", 20050, 77)
    legacy = child_params("a", 1, prompt_index=-1)
    del legacy["token"]
    assert parse_remote_decodes(dispatch(legacy)).broken[0].reachable is None


def test_the_key_of_a_batch_names_a_child_whose_own_id_is_unusable() -> None:
    batch = {"a": child_params(request_id=7), "b": 7, "\ud800": 7}  # type: ignore[arg-type]
    remote = parse_remote_decodes({**dispatch(child_params()), "batch_kv_transfer_params": batch})
    assert [broken.request_id for broken in remote.broken] == ["a", "b", ""]


def test_beside_a_broken_child_no_prompt_is_taken_for_granted() -> None:
    """The only child left must not be given the KV of the broken one's prompt."""
    remote = parse_remote_decodes(dispatch(child_params("a", 1), child_params("b", 2, prompt_index=-1)))
    assert [child.request_id for child in remote.of_prompt("cmpl-x-0-aaaaaaaa")] == ["a"]
    assert remote.of_prompt("cmpl-x-1-aaaaaaaa") == ()


def test_error_texts_are_short() -> None:
    (broken,) = parse_remote_decodes(dispatch(child_params(remote_host="x" * 100_000))).broken
    assert len(broken.reason) < 300


def test_children_of_no_prompt() -> None:
    assert RemoteDecodes("x", "rv", ()).children == ()
