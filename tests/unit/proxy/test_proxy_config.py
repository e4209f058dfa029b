"""Command line."""

import argparse
from pathlib import Path

import pytest
from rd2h_proxy import config
from rd2h_proxy.errors import ConfigError

GUIDE = (
    "--host 127.0.0.1 --port 9000 --prefiller-hosts 127.0.0.1 --prefiller-ports 8100"
    " --decoder-hosts 127.0.0.1 --decoder-ports 8200"
)


def parse(line: str) -> config.ProxyConfig:
    parser = argparse.ArgumentParser()
    config.add_arguments(parser)
    return config.config_from(parser.parse_args(line.split()))


def test_the_guides_line_works_unchanged() -> None:
    settings = parse(GUIDE)
    assert (settings.host, settings.port) == ("127.0.0.1", 9000)
    assert settings.prefill == ("127.0.0.1:8100",)
    assert settings.decode == ("127.0.0.1:8200",)
    assert not settings.discover


def test_several_engines_and_ipv6() -> None:
    settings = parse("--prefiller-hosts ::1 [fe80::2] --prefiller-ports 1 2 --decoder-hosts d --decoder-ports 3")
    assert settings.prefill == ("[::1]:1", "[fe80::2]:2")


def test_the_address_to_listen_on_may_have_brackets() -> None:
    assert parse("--host [::1]").host == parse("--host ::1").host == "::1"


def test_without_engines_they_come_from_the_registry() -> None:
    assert parse("--meta-service grpc://meta:7700").discover


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--prefiller-hosts a b --prefiller-ports 1", "2 hosts and 1 ports"),
        ("--prefiller-hosts a --prefiller-ports 70000", "--prefiller-ports: 70000 given, allowed are 1 to 65535"),
        ("--decoder-hosts 0.0.0.0 --decoder-ports 1", "wildcard"),
        ("--decoder-hosts [::] --decoder-ports 1", "wildcard"),
        ("--decoder-hosts http://10.0.0.1 --decoder-ports 1", "--decoder-hosts: 'http://10.0.0.1' given"),
        ("--prefiller-hosts a..b --prefiller-ports 1", "--prefiller-hosts: 'a..b' given"),
        ("--prefiller-hosts 10.0.0.1:80 --prefiller-ports 1", "--prefiller-hosts: '10.0.0.1:80' given"),
        ("--meta-service-for-decode meta", "--meta-service-for-decode: "),
        ("--meta-service http://meta:1", "--meta-service: "),
        ("--meta-cert c --meta-ca a", "--meta-cert, --meta-key"),
        ("--meta-key k --meta-service grpcs://meta:1", "--meta-cert, --meta-key"),
        ("--meta-server-name n", "--meta-server-name"),
        ("--decoder-hosts a a --decoder-ports 1 1", "once"),
        ("--port 65536", "--port: 65536 given, allowed are 0 to 65535"),
        ("--queue-s 0", "--queue-s: 0 given"),
        ("--ttl-s 7201", "--ttl-s: 7201 given, allowed are seconds above 0 and up to 7200"),
        ("--max-bodies-mib 63", "--max-bodies-mib: 63 given, allowed are --max-body-mib (64) and more"),
        ("--max-passing 0", "--max-passing: 0 given, allowed are 1 to"),
        ("--retries -1", "--retries: -1 given"),
        ("--meta-token-file /nonexistent/token", "cannot be read"),
    ],
)
def test_unusable_values_are_one_line_errors(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(line)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_token_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"--meta-token-file: .* cannot be read"):
        parse(f"--meta-token-file {path}")
