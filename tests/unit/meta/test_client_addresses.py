"""Targets and hosts as text."""

import pytest
from rd2h_client.addresses import AddressError, Target, is_loopback, join_host_port, parse_target, split_host_port


@pytest.mark.parametrize(
    ("text", "target", "authority"),
    [
        ("grpc://meta:7700", Target("meta", 7700, False), "meta:7700"),
        ("grpcs://meta.example:7700/", Target("meta.example", 7700, True), "meta.example:7700"),
        ("10.0.0.1:1", Target("10.0.0.1", 1, False), "10.0.0.1:1"),
        ("grpc://[fd00::7]:65535", Target("fd00::7", 65535, False), "[fd00::7]:65535"),
    ],
)
def test_good_targets(text: str, target: Target, authority: str) -> None:
    parsed = parse_target(text)
    assert parsed == target
    assert parsed.authority == authority
    assert parse_target(parsed.url) == target


@pytest.mark.parametrize(
    "text",
    [
        "", "meta", "meta:", "meta:0", "meta:65536", "meta:x", "http://meta:1", "grpc://", "fd00::7:1", "grpc://a:1/b",
        "grpc://user@a:1", "grpc://0.0.0.0:1", "[::]:1", "*:1", "a b:1", "grpc://a:1?x", "unix:/tmp/x", "dns:///a:1",
        "a:1,b:2",
    ],
)  # fmt: skip
def test_bad_targets_name_the_text_and_what_is_allowed(text: str) -> None:
    with pytest.raises(AddressError, match=r"meta service address: got .*allowed: "):
        parse_target(text)


def test_joining_and_splitting() -> None:
    assert join_host_port("::1", 5) == "[::1]:5"
    assert split_host_port("[::1]:5") == ("::1", 5)
    assert split_host_port("a:5") == ("a", 5)


@pytest.mark.parametrize(("host", "wanted"), [
    ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True),
    ("10.0.0.1", False), ("meta", False), ("0.0.0.0", False), ("", False), ("localhost.evil.example", False),
])  # fmt: skip
def test_loopback(host: str, wanted: bool) -> None:
    assert is_loopback(host) is wanted
