"""Hostile and careless messages are refused with field, value and what is allowed. Cases R8, R10."""

import pytest
from meta_builders import child, decode, layout, prefill
from rd2h_client.v1.engine_registry_pb2 import Engine, LayerLayout
from rd2h_client.v1.rendezvous_pb2 import Child
from rd2h_meta import validation
from rd2h_meta.errors import InvalidFieldError

WILDCARDS = ["", "*", "0.0.0.0", "::", "::ffff:0.0.0.0", "0", "224.0.0.1", "ff02::1"]
BAD_HOSTS = [*WILDCARDS, "[::1]", "fe80::1%eth0", "a b", "-a", "a/b", "a..b", "1.2.3", "x" * 300, "host:1", "a\n"]


@pytest.mark.parametrize("host", ["10.0.0.1", "::1", "fe80::1", "node-7.cluster.local", "node_7", "localhost", "d7."])
def test_good_hosts(host: str) -> None:
    validation.check_engine(decode(host=host), 100)
    validation.check_child(child(host=host))


@pytest.mark.parametrize("host", BAD_HOSTS)
def test_bad_hosts_are_refused_for_engines_and_children(host: str) -> None:
    with pytest.raises(InvalidFieldError, match=r"engine\.host"):
        validation.check_engine(decode(host=host), 100)
    with pytest.raises(InvalidFieldError, match=r"child\.host"):
        validation.check_child(child(host=host))


@pytest.mark.parametrize(("base_port", "tp_size", "good"), [
    (1, 1, True), (65_535, 1, True), (65_534, 2, True), (0, 1, False), (65_535, 2, False), (70_000, 1, False),
])  # fmt: skip
def test_ports_of_all_ranks(base_port: int, tp_size: int, good: bool) -> None:
    for check in (
        lambda: validation.check_engine(decode(base_port=base_port, tp_size=tp_size), 100),
        lambda: validation.check_child(child(base_port=base_port, tp_size=tp_size)),
    ):
        if good:
            check()
        else:
            with pytest.raises(InvalidFieldError, match="base_port"):
                check()


@pytest.mark.parametrize(
    ("engine", "field"),
    [
        (decode(engine_id=""), "engine_id"),
        (decode(engine_id="x" * 257), "engine_id"),
        (decode(engine_id="é" * 129), "engine_id"),
        (decode(engine_id="a\nb"), "engine_id"),
        (decode(generation=0), "generation"),
        (decode(role=0), "role"),
        (decode(role=9), "role"),
        (decode(state=9), "state"),
        (decode(tp_size=0), "tp_size"),
        (decode(tp_size=5_000), "tp_size"),
        (decode(dp_size=5_000), "dp_size"),
        (decode(dp_size=2, dp_rank=2), "dp_rank"),
        (decode(dp_rank=1), "dp_rank"),
        (decode(http_address="nowhere"), "http_address"),
        (decode(http_address="0.0.0.0:80"), "http_address"),
        (decode(http_address="::1:80"), "http_address"),
        (decode(http_address="a:70000"), "http_address"),
        (prefill(host="*"), "host"),
        (decode(layout=layout(model="a\x00b")), "layout.model"),
        (decode(layout=layout(fingerprint=b"x" * 65)), "layout.fingerprint"),
        (decode(layout=layout(layers=[LayerLayout(name="l")] * 101)), "layout.layers"),
        (decode(layout=layout(layers=[LayerLayout()])), "layout.layers[0].name"),
        (decode(layout=layout(layers=[LayerLayout(name="l", main_block_bytes=[1] * 17)])), "main_block_bytes"),
    ],
)
def test_bad_engines(engine: Engine, field: str) -> None:
    with pytest.raises(InvalidFieldError) as refused:
        validation.check_engine(engine, 100)
    assert field in refused.value.field
    assert "allowed: " in refused.value.message


def test_good_prefill_without_and_with_an_address() -> None:
    validation.check_engine(prefill(), 100)
    validation.check_engine(prefill(host="10.0.0.9", http_address="[::1]:8000"), 100)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"request_id": ""}, "request_id"),
        ({"request_id": "x" * 513}, "request_id"),
        ({"token": b"short"}, "token"),
        ({"token": b"x" * 17}, "token"),
        ({"engine_id": ""}, "engine_id"),
        ({"tp_size": 0}, "tp_size"),
        ({"pcp_size": 9_999}, "pcp_size"),
        ({"layout_fingerprint": b"x" * 65}, "layout_fingerprint"),
        ({"prompt_index": 10_000_000}, "prompt_index"),
        ({"choice_index": 10_000_000}, "choice_index"),
    ],
)
def test_bad_children(changes: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidFieldError) as refused:
        validation.check_child(child(**changes))
    assert refused.value.field == f"child.{field}"


def test_messages_never_carry_more_than_a_little_of_hostile_input() -> None:
    with pytest.raises(InvalidFieldError) as refused:
        validation.check_engine(decode(engine_id="x" * 100_000), 100)
    assert len(refused.value.message) < 300


def test_reasons_are_cleaned_and_cut() -> None:
    assert validation.clean_reason("a\r\nb\x1b[31m") == "a  b [31m"
    cut = validation.clean_reason("é" * 5_000)
    assert len(cut.encode()) <= validation.MAX_REASON_BYTES
    assert cut.endswith("...")
    assert validation.clean_reason("x" * 300) == "x" * 300
    assert validation.clean_reason("") == ""


def with_unknown_field(message: bytes, size_bytes: int) -> bytes:
    """The message with a field that nobody here knows, as another version, or an attacker, might send it."""
    tag, length = (1_000 << 3) | 2, size_bytes
    encoded = bytearray()
    for number in (tag, length):
        while number > 127:
            encoded.append(number & 127 | 128)
            number >>= 7
        encoded.append(number)
    return message + bytes(encoded) + bytes(size_bytes)


def test_unknown_fields_of_another_version_are_fine_but_bounded() -> None:
    """They are kept and sent on: unbounded, one engine could make a message that no watcher may receive."""
    small = with_unknown_field(decode().SerializeToString(), 100)
    validation.check_engine(Engine.FromString(small), 100)
    with pytest.raises(InvalidFieldError, match=r"engine: got .* bytes"):
        validation.check_engine(Engine.FromString(with_unknown_field(small, 2_000_000)), 100)
    small = with_unknown_field(child().SerializeToString(), 100)
    validation.check_child(Child.FromString(small))
    with pytest.raises(InvalidFieldError, match=r"child: got .* bytes"):
        validation.check_child(Child.FromString(with_unknown_field(small, 2_000)))


def test_the_longest_engine_and_child_that_the_fields_allow_are_within_the_bounds() -> None:
    name = "x" * 512
    layers = [LayerLayout(name=name, main_block_bytes=[2**63] * 16, indexer_block_bytes=2**63) for _ in range(1_024)]
    longest = layout(layers=layers, transfer_backend=name, model=name, kv_dtype=name, fingerprint=b"f" * 64)
    validation.check_engine(decode("d" * 256, layout=longest), 1_024)
    host = ".".join(["h" * 60] * 4)
    validation.check_child(child("c" * 512, engine_id="d" * 256, host=host, layout_fingerprint=b"f" * 64))
