"""`rd2h meta serve` as an operator meets it: settings, errors in one line, metrics, drain."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from meta_certificates import Authority
from meta_harness import MetaProcess, child, engine, take, take_all, until
from rd2h_client import ClientOptions, MetaClient, MetaUnavailableError
from rd2h_client.v1 import rendezvous_pb2 as rv
from rd2h_client.v1.engine_registry_pb2 import WatchEnginesRequest
from rd2h_client.v1.engine_registry_pb2_grpc import EngineRegistryStub


def refusal(*flags: str, **environment: str) -> str:
    """What a service says that does not start."""
    done = subprocess.run(
        [sys.executable, "-m", "rd2h_meta.cli", "serve", *flags],
        capture_output=True,
        text=True,
        timeout=30,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 2, done
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--listen", "0.0.0.0:7700"], "rd2h meta: listen: got '0.0.0.0:7700', allowed without"),
        (["--listen", "[::]:7700"], "listen: got '[::]:7700', allowed without"),
        (["--listen", "nonsense"], "listen: got 'nonsense', allowed: host:port"),
        (["--listen", "127.0.0.1:99999"], "listen: got '127.0.0.1:99999', allowed: a port in 1..65535"),
        (["--grace-s", "soon"], "grace_s: got 'soon', allowed: a number"),
        (["--max-open", "0"], "max_open: got 0, allowed: 1..10000000"),
        (["--log-format", "xml"], "log_format: got 'xml', allowed: text, json"),
        (["--tls-cert", "x"], "tls_cert, tls_key: got only one"),
        (["--tls-client-ca", "x"], "tls_client_ca: got no tls_cert beside it"),
        (["--tls-cert", "/missing", "--tls-key", "/missing"], "tls_key: got '/missing', which cannot be read"),
        (["--token-file", "/missing"], "token_file: got '/missing', which cannot be read"),
        (["--default-ttl-s", "121"], "default_ttl_s: got 121.0, allowed: 1..120 seconds"),
        (
            ["--listen", "127.0.0.1:0", "--metrics-listen", "a..b:77"],
            "metrics_listen: got 'a..b:77', which cannot be bound",
        ),
        (["--config", "/missing"], "config: got '/missing', which cannot be read"),
    ],
)
def test_wrong_settings_are_one_line(flags: list[str], words: str) -> None:
    assert words in refusal(*flags)


def test_certificates_that_are_none_or_do_not_fit_are_named(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ours")
    one, other = authority.issue("one"), authority.issue("other")
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("no certificate")
    bad = str(nonsense)
    listen = ("--listen", "127.0.0.1:0")
    for cert, key in ((bad, one.key), (one.cert, bad), (one.cert, other.key)):
        assert "tls_cert, tls_key: got" in refusal(*listen, "--tls-cert", cert, "--tls-key", key)
    good = ("--tls-cert", one.cert, "--tls-key", one.key)
    assert "tls_client_ca: got" in refusal(*listen, *good, "--tls-client-ca", bad)


def test_settings_from_file_and_environment(tmp_path: Path) -> None:
    file = tmp_path / "meta.toml"
    file.write_text('listen = "0.0.0.0:1"\n')
    assert "listen: got '0.0.0.0:1'" in refusal("--config", str(file))
    assert "listen: got '0.0.0.0:2'" in refusal("--config", str(file), RD2H_META_LISTEN="0.0.0.0:2")
    assert "listen: got '0.0.0.0:3'" in refusal("--listen", "0.0.0.0:3", RD2H_META_LISTEN="0.0.0.0:2")
    file.write_text("speed = 3\n")
    assert "speed: got a setting that does not exist" in refusal("--config", str(file))
    file.write_text('max_open = "many"\n')
    assert "max_open: got 'many', allowed: a whole number" in refusal("--config", str(file))
    file.write_text("insecure_listen = 1\n")
    assert "insecure_listen: got 1, allowed: true or false" in refusal("--config", str(file))
    file.write_text("= nonsense\n")
    assert "which is not TOML" in refusal("--config", str(file))


def test_a_busy_port_is_refused() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        assert f"listen: got '127.0.0.1:{port}', which cannot be bound" in refusal("--listen", f"127.0.0.1:{port}")
        assert "metrics_listen: got" in refusal("--listen", "127.0.0.1:0", "--metrics-listen", f"127.0.0.1:{port}")


def test_two_services_never_share_a_port(make_service: Callable[..., MetaProcess]) -> None:
    service = make_service()
    assert "cannot be bound" in refusal("--listen", service.address)


async def test_a_non_loopback_address_when_told_so(make_service: Callable[..., MetaProcess]) -> None:
    service = make_service("--insecure-listen", listen="0.0.0.0:0")
    port = service.address.rsplit(":", 1)[1]
    async with MetaClient(f"127.0.0.1:{port}") as client:
        assert await client.list_engines() == []


async def test_ipv6(make_service: Callable[..., MetaProcess]) -> None:
    service = make_service(listen="[::1]:0")
    assert service.address.startswith("[::1]:")
    async with MetaClient(f"grpc://{service.address}") as client:
        assert await client.list_engines() == []


async def fetch(address: str, request: bytes) -> str:
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(request)
        await writer.drain()
        return (await asyncio.wait_for(reader.read(), 10.0)).decode()
    except ConnectionResetError:
        return ""  # cut off, as too long a request is
    finally:
        writer.close()


async def test_metrics(make_service: Callable[..., MetaProcess]) -> None:
    service = make_service("--metrics-listen", "127.0.0.1:0")
    url = service.next_line("rd2h meta: metrics on ")
    address = url.removeprefix("http://").removesuffix("/metrics")
    async with MetaClient(service.target) as client:
        await client.register(engine("d0"))
        await client.advertise("r", child("a"))
        await client.report_failure("s", "broken")
        answer = await fetch(address, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    head, _, body = answer.partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 OK")
    values = {}
    for line in body.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            values[name] = float(value)
    assert values['rd2h_meta_engines{role="decode",serving="true"}'] == 1
    assert values["rd2h_meta_children_live"] == 1
    assert values['rd2h_meta_rendezvous_ended_total{outcome="failed"}'] == 1
    assert values["rd2h_meta_advertised_total"] == 1
    typed = {line.split()[2] for line in body.splitlines() if line.startswith("# TYPE ")}
    assert {name.partition("{")[0] for name in values} == typed
    assert (await fetch(address, b"GET / HTTP/1.1\r\n\r\n")).startswith("HTTP/1.1 404")
    assert (await fetch(address, b"POST /metrics HTTP/1.1\r\n\r\n")).startswith("HTTP/1.1 405")
    assert await fetch(address, b"x" * 100_000) == ""


async def test_json_logs(make_service: Callable[..., MetaProcess]) -> None:
    service = make_service("--log-format", "json")
    await until(lambda: service.log)
    entry = json.loads(service.log[0])
    assert (entry["message"], entry["level"], entry["address"]) == ("serving", "info", service.address)


async def test_sigterm_lets_waiters_finish_and_tells_watchers(make_service: Callable[..., MetaProcess]) -> None:
    service = make_service("--grace-s", "15")
    async with (
        MetaClient(service.target, ClientOptions(deadline_s=0.7)) as client,
        grpc.aio.insecure_channel(service.address) as channel,
    ):
        watch = EngineRegistryStub(channel).WatchEngines(WatchEnginesRequest())
        await watch.read()
        health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
        events = client.await_children("r", 1, ttl_s=60.0)
        await until(lambda: not len(client.exchange.pending))
        service.signal(signal.SIGTERM)
        assert (await asyncio.wait_for(health.read(), 5.0)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as told:
            await asyncio.wait_for(watch.read(), 5.0)
        assert told.value.code() is grpc.StatusCode.UNAVAILABLE
        await client.advertise("r", child("a"))  # for a waiter that is there: still welcome
        assert await take(events, 2) == ["advertised a", "complete 1"]
        late = client.await_children("new", 1, ttl_s=60.0)
        with pytest.raises((MetaUnavailableError, TimeoutError)):
            await take(late, 1, timeout_s=1.0)
        await late.aclose()
        await client.withdraw("r", "a", rv.OUTCOME_DONE)
        assert await take_all(events) == ["ended a DONE", "closed DONE"]
        started_s = time.monotonic()
        assert await asyncio.to_thread(service.wait) == 0
        assert time.monotonic() - started_s < 10.0


async def test_sigterm_ends_within_the_grace_period_whoever_waits(make_service: Callable[..., MetaProcess]) -> None:
    service = make_service("--grace-s", "1")
    async with MetaClient(service.target) as client:
        events = client.await_children("r", 1, ttl_s=60.0)
        await until(lambda: not len(client.exchange.pending))
        service.signal(signal.SIGTERM)
        started_s = time.monotonic()
        assert await asyncio.to_thread(service.wait) == 0
        assert time.monotonic() - started_s < 6.0
        await events.aclose()
    assert not [line for line in service.log if "Traceback" in line]
