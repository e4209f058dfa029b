"""The JSON `kv_transfer_params` that a proxy hands to a Prefill engine, made from advertised children.

The key names are a contract with existing engines and proxies; see docs/control-plane.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from rd2h_client.v1.rendezvous_pb2 import Child

KvTransferParams = dict[str, object]
"""A JSON object."""

BATCH_KEY = "batch_kv_transfer_params"
"""Key of the map from child request id to that child's parameters, when one dispatch serves several children."""


def child_to_params(child: Child) -> KvTransferParams:
    """Return the parameters with which Prefill publishes to one child.

    Sizes that the advert leaves out are 1. `token` and `layout_fingerprint` are lower-case hexadecimal.
    """
    return {
        "request_id": child.request_id,
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_engine_id": child.engine_id,
        "remote_host": child.host,
        "remote_port": child.base_port,
        "remote_tp_size": child.tp_size or 1,
        "remote_pcp_size": child.pcp_size or 1,
        "remote_dcp_size": child.dcp_size or 1,
        "remote_cached_tokens": child.cached_tokens,
        "token": child.token.hex(),
        "generation": child.generation,
        "wire_version": child.wire_version,
        "layout_fingerprint": child.layout_fingerprint.hex(),
        "prompt_index": child.prompt_index,
        "choice_index": child.choice_index,
    }


def batch_params(children: Sequence[Child]) -> KvTransferParams:
    """Return the parameters of one dispatch that serves all `children`: the first one's keys plus the map of all.

    Raises:
        ValueError: there is no child, or two have the same request id.
    """
    if not children:
        raise ValueError("children: got none, allowed: at least one")
    by_request_id = {child.request_id: child_to_params(child) for child in children}
    if len(by_request_id) != len(children):
        got = f"{len(children)} with {len(by_request_id)} different request ids"
        raise ValueError(f"children: got {got}, allowed: each request id once")
    return {**child_to_params(children[0]), BATCH_KEY: by_request_id}
