"""The JSON that a proxy hands to Prefill."""

import json

import pytest
from meta_builders import child
from rd2h_client.kv_params import batch_params, child_to_params


def test_every_key_of_one_child() -> None:
    advert = child(
        "cmpl-x-0",
        token=bytes(range(16)),
        generation=2**63 + 5,
        cached_tokens=256,
        wire_version=1,
        layout_fingerprint=b"\xab\xcd",
        prompt_index=3,
        choice_index=1,
    )
    assert json.loads(json.dumps(child_to_params(advert))) == {
        "request_id": "cmpl-x-0",
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_engine_id": "d0",
        "remote_host": "10.0.0.1",
        "remote_port": 20050,
        "remote_tp_size": 2,
        "remote_pcp_size": 1,
        "remote_dcp_size": 1,
        "remote_cached_tokens": 256,
        "token": "000102030405060708090a0b0c0d0e0f",
        "generation": 2**63 + 5,
        "wire_version": 1,
        "layout_fingerprint": "abcd",
        "prompt_index": 3,
        "choice_index": 1,
    }


def test_several_children() -> None:
    children = [child("a"), child("b", prompt_index=1)]
    params = batch_params(children)
    assert params["request_id"] == "a"
    assert params["batch_kv_transfer_params"] == {"a": child_to_params(children[0]), "b": child_to_params(children[1])}


def test_no_child_and_a_child_twice_are_errors() -> None:
    with pytest.raises(ValueError, match="at least one"):
        batch_params([])
    with pytest.raises(ValueError, match="2 with 1 different"):
        batch_params([child("a"), child("a")])
