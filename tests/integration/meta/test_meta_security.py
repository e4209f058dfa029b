"""Who may talk to the service: TLS, mutual TLS, token, and what must not be possible. Nothing secret in logs."""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from meta_certificates import Authority, Pair
from meta_harness import MetaProcess, child, engine, in_background, take, until
from rd2h_client import (
    ClientOptions,
    MetaClient,
    MetaRefusedError,
    MetaUnavailableError,
    OptionsError,
    RetryOptions,
    SyncMetaClient,
    TlsOptions,
)

TOKEN = "s3cret-token-of-this-test"
HANDSHAKE_S = 1.5


@dataclass(frozen=True)
class World:
    """Good and bad credentials."""

    ours: Authority
    foreign: Authority
    server: Pair
    expired: Pair
    client: Pair
    foreign_client: Pair
    expired_client: Pair
    token_file: str


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    directory = tmp_path_factory.mktemp("certificates")
    ours, foreign = Authority(directory, "ours"), Authority(directory, "foreign")
    token_file = directory / "token"
    token_file.write_text(f"{TOKEN}\n")
    return World(
        ours=ours,
        foreign=foreign,
        server=ours.issue("server"),
        expired=ours.issue("expired-server", days=-1),
        client=ours.issue("client"),
        foreign_client=foreign.issue("foreign-client"),
        expired_client=ours.issue("expired-client", days=-1),
        token_file=str(token_file),
    )


def options(tls: TlsOptions | None = None, token: str | None = None) -> ClientOptions:
    return ClientOptions(tls=tls, token=token, connect_deadline_s=HANDSHAKE_S, retry=RetryOptions(max_attempts=1))


async def works(service: MetaProcess, wanted: ClientOptions, scheme: str = "grpcs") -> None:
    """Everything a client does works with these options."""
    target = f"{scheme}://{service.address}"
    async with MetaClient(target, wanted) as client:
        rid = secrets.token_hex(8)
        events = client.await_children(rid, 1, ttl_s=30.0)
        async with in_background(target, engine("d0"), tls=wanted.tls, token=wanted.token) as decode:
            decode.advertise(rid, child("a"))
            assert await take(events, 2) == ["advertised a", "complete 1"]
            await until(client.list_engines)
        await client.cancel(rid, "over")
    with SyncMetaClient(target, wanted) as simple:
        assert (await asyncio.to_thread(simple.stats)).service_id


async def refused(service: MetaProcess, wanted: ClientOptions, words: str, scheme: str = "grpcs") -> None:
    """No client gets in with these options, and the error says why."""
    with pytest.raises((MetaRefusedError, MetaUnavailableError), match=words) as error:
        await MetaClient(f"{scheme}://{service.address}", wanted).start()
    assert TOKEN not in str(error.value)


@pytest.fixture
def logs_are_clean(make_service: Callable[..., MetaProcess]):  # type: ignore[no-untyped-def]
    made: list[MetaProcess] = []

    def make(*flags: str) -> MetaProcess:
        made.append(make_service(*flags, "--log-level", "debug"))
        return made[-1]

    yield make
    for service in made:
        text = "\n".join(service.log)
        assert TOKEN not in text
        assert "PRIVATE KEY" not in text
        assert "Traceback" not in text, text


async def test_tls(logs_are_clean: Callable[..., MetaProcess], world: World) -> None:
    service = logs_are_clean("--tls-cert", world.server.cert, "--tls-key", world.server.key)
    await works(service, options(TlsOptions(ca_path=world.ours.ca)))
    await works(service, options(TlsOptions(ca_path=world.ours.ca, server_name_override="localhost")))
    await refused(service, options(TlsOptions(ca_path=world.foreign.ca)), "(?i)certificate|handshake|ssl")
    await refused(service, options(TlsOptions(world.ours.ca, server_name_override="other")), "(?i)peer|name|handshake")
    await refused(service, options(), "no answer", scheme="grpc")


async def test_an_expired_server_certificate(logs_are_clean: Callable[..., MetaProcess], world: World) -> None:
    service = logs_are_clean("--tls-cert", world.expired.cert, "--tls-key", world.expired.key)
    await refused(service, options(TlsOptions(ca_path=world.ours.ca)), "(?i)certificate|handshake|ssl")


async def test_mutual_tls(logs_are_clean: Callable[..., MetaProcess], world: World) -> None:
    service = logs_are_clean(
        "--tls-cert", world.server.cert, "--tls-key", world.server.key, "--tls-client-ca", world.ours.ca
    )
    ca = world.ours.ca
    await works(service, options(TlsOptions(ca, world.client.cert, world.client.key)))
    await refused(service, options(TlsOptions(ca)), "no answer")
    for pair in (world.foreign_client, world.expired_client):
        await refused(service, options(TlsOptions(ca, pair.cert, pair.key)), "no answer")


async def test_token(logs_are_clean: Callable[..., MetaProcess], world: World) -> None:
    tls = TlsOptions(ca_path=world.ours.ca)
    service = logs_are_clean(
        "--tls-cert", world.server.cert, "--tls-key", world.server.key, "--token-file", world.token_file
    )
    await works(service, options(tls, TOKEN))
    for token in (None, "wrong", TOKEN + "x", TOKEN[:-1]):
        await refused(service, options(tls, token), "UNAUTHENTICATED: a valid bearer token is required")


async def test_a_wrong_token_fails_pending_work_at_once_and_probes_need_none(
    logs_are_clean: Callable[..., MetaProcess], world: World
) -> None:
    service = logs_are_clean("--token-file", world.token_file)
    client = MetaClient(service.target, options(token="wrong"))
    client.start_connecting()
    with pytest.raises(MetaRefusedError, match="UNAUTHENTICATED"):
        await asyncio.wait_for(client.advertise("r", child("a")), 5.0)
    with pytest.raises(MetaRefusedError, match="UNAUTHENTICATED"):
        await client.list_engines()
    with pytest.raises(MetaRefusedError, match="UNAUTHENTICATED"):
        await anext(client.watch_engines())
    await client.close()
    async with grpc.aio.insecure_channel(service.address) as channel:
        response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert response.status == health_pb2.HealthCheckResponse.SERVING
    await works(service, options(token=TOKEN), scheme="grpc")


def test_a_token_does_not_leave_the_machine_in_plain_text() -> None:
    with pytest.raises(OptionsError, match="neither TLS nor loopback") as refusal:
        MetaClient("grpc://meta.example:7700", ClientOptions(token=TOKEN))
    assert TOKEN not in str(refusal.value)
    assert TOKEN not in repr(ClientOptions(token=TOKEN))
    MetaClient("grpc://meta.example:7700", ClientOptions(token=TOKEN, allow_plain_token=True))
    MetaClient("grpcs://meta.example:7700", ClientOptions(token=TOKEN))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match=r"tls\.ca_path: got '.*missing.*', which cannot be read: No such file"):
        MetaClient("grpcs://localhost:1", ClientOptions(tls=TlsOptions(ca_path=str(tmp_path / "missing"))))
    with pytest.raises(OptionsError, match=r"tls\.cert_path, tls\.key_path"):
        MetaClient("grpcs://localhost:1", ClientOptions(tls=TlsOptions(cert_path="x")))


async def test_probes_without_credentials_have_a_listener_of_their_own(
    make_service: Callable[..., MetaProcess], world: World
) -> None:
    service = make_service(
        "--tls-cert", world.server.cert, "--tls-key", world.server.key, "--tls-client-ca", world.ours.ca,
        "--probe-listen", "127.0.0.1:0",
    )  # fmt: skip
    address = service.next_line("rd2h meta: probes on ")
    async with grpc.aio.insecure_channel(address) as channel:
        response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert response.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await channel.unary_unary("/rd2h.meta.v1.EngineRegistry/ListEngines")(b"")
        assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED
