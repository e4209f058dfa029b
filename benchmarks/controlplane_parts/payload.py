"""The advert that every system carries."""

from rd2h_client.v1.rendezvous_pb2 import AdvertiseRequest, Child

CHILD = Child(
    request_id="cmpl-0f3a9c64d2b847e19f5c7a1b2d3e4f50-0-1a2b3c4d",
    token=bytes(range(16)),
    engine_id="decode-7c9f54b8d-x2x4q",
    generation=0x1234_5678_9ABC_DEF0,
    host="10.12.34.56",
    base_port=20050,
    tp_size=8,
    pcp_size=1,
    dcp_size=1,
    cached_tokens=1024,
    wire_version=1,
    layout_fingerprint=bytes(32),
    prompt_tokens=4096,
)


def as_message(rendezvous_id: str) -> AdvertiseRequest:
    """The advert as a protobuf message."""
    return AdvertiseRequest(rendezvous_id=rendezvous_id, child=CHILD)


def as_json(rendezvous_id: str) -> dict[str, object]:
    """The advert as the body of a POST."""
    fields: dict[str, object] = {
        name.name: value.hex() if isinstance(value, bytes) else value for name, value in CHILD.ListFields()
    }
    return {"rendezvous_id": rendezvous_id, **fields}
