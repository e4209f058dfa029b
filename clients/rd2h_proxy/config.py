"""Settings of the proxy from the command line and the environment, checked before anything starts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass

from rd2h_client.addresses import (
    DEFAULT_TARGET,
    TARGET_VARIABLE,
    AddressError,
    check_advertised_host,
    join_host_port,
    parse_target,
)

from rd2h_proxy.errors import ConfigError
from rd2h_proxy.limits import AttemptLimits, RecomputeMode, ServingLimits

ENV_META_TOKEN = "RD2H_META_TOKEN"


@dataclass(frozen=True, slots=True)
class ProxyConfig:
    """Everything that `run` needs."""

    host: str
    port: int
    prefill: tuple[str, ...]
    """host:port of each Prefill engine named on the command line."""
    decode: tuple[str, ...]
    discover: bool
    """Whether engines of the registry join."""
    meta_service: str
    meta_advertised: str
    """The meta service's address as Decode engines know it."""
    meta_token: str | None
    meta_ca: str | None
    meta_cert: str | None
    meta_key: str | None
    meta_server_name: str | None
    meta_outage_s: float
    prefill_limit: int
    decode_limit: int
    max_waiting: int
    max_body_bytes: int
    max_bodies_bytes: int
    max_passing: int
    stream_idle_s: float
    client_stall_s: float
    attempt: AttemptLimits
    serving: ServingLimits


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `rd2h proxy`."""
    listen = parser.add_argument_group("where to listen")
    listen.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    listen.add_argument("--port", type=int, default=8000, help="port; 0 takes a free one (default %(default)s)")
    engines = parser.add_argument_group(
        "engines", "name them here, or leave both roles out to take them from the registry"
    )
    for role, word in (("prefiller", "Prefill"), ("decoder", "Decode")):
        engines.add_argument(f"--{role}-hosts", nargs="+", default=[], metavar="HOST", help=f"{word} OpenAI servers")
        engines.add_argument(
            f"--{role}-ports", nargs="+", type=int, default=[], metavar="PORT", help=f"one port for each {word} host"
        )
    engines.add_argument(
        "--recompute",
        default=RecomputeMode.AUTO.value,
        choices=[mode.value for mode in RecomputeMode],
        help="continue requests that Decode gives back (default %(default)s: where engines may do so)",
    )
    engines.add_argument(
        "--discover", action="store_true", help="also take engines from the registry of the meta service"
    )
    engines.add_argument(
        "--prefill-limit", type=int, default=256, help="requests in flight on one Prefill (default %(default)s)"
    )
    engines.add_argument(
        "--decode-limit", type=int, default=2048, help="requests in flight on one Decode (default %(default)s)"
    )
    _add_meta_arguments(parser)
    _add_limit_arguments(parser)


def _add_meta_arguments(parser: argparse.ArgumentParser) -> None:
    meta = parser.add_argument_group("meta service")
    meta.add_argument(
        "--meta-service",
        default=os.environ.get(TARGET_VARIABLE, DEFAULT_TARGET),
        metavar="grpc://HOST:PORT",
        help=f"rendezvous service beside Decode; grpcs is TLS (default ${TARGET_VARIABLE} or {DEFAULT_TARGET})",
    )
    meta.add_argument(
        "--meta-service-for-decode", metavar="grpc://HOST:PORT", help="its address as Decode knows it, if different"
    )
    meta.add_argument("--meta-token-file", metavar="FILE", help=f"file with the bearer token (or ${ENV_META_TOKEN})")
    meta.add_argument("--meta-ca", metavar="FILE", help="CA certificates that the service's certificate must come from")
    meta.add_argument("--meta-cert", metavar="FILE", help="client certificate, for mutual TLS")
    meta.add_argument("--meta-key", metavar="FILE", help="key of the client certificate")
    meta.add_argument("--meta-server-name", metavar="NAME", help="name expected in the service's certificate")
    meta.add_argument(
        "--meta-outage-s",
        type=float,
        default=8.0,
        help="new requests wait this long for its return (default %(default)s)",
    )


def _add_limit_arguments(parser: argparse.ArgumentParser) -> None:
    limits = parser.add_argument_group("limits")
    attempt, serving = AttemptLimits(), ServingLimits()
    for flag, default, text in (
        ("--queue-s", serving.queue_s, "longest wait for a Decode with room"),
        ("--prefill-queue-s", attempt.prefill_queue_s, "longest wait of a wave for a Prefill with room"),
        ("--rendezvous-s", attempt.rendezvous_s, "Decode must have advertised a first child by then"),
        ("--prefill-s", attempt.prefill_s, "Prefill must have computed a wave by then"),
        ("--ttl-s", attempt.ttl_s, "how long the meta service keeps a rendezvous"),
        ("--gather-window-s", attempt.gather_window_s, "silence after which the children that are there go first"),
        ("--stream-idle-s", 600.0, "longest silence of an engine; an answer that is not streamed is one silence"),
        ("--client-stall-s", 300.0, "a client that does not read, or send its body, for so long is cut off"),
    ):
        limits.add_argument(flag, type=float, default=default, help=f"{text} (default %(default)s)")
    for flag, count, text in (
        ("--max-waiting", 1024, "requests that may wait for an engine; more get 429"),
        ("--max-children", serving.max_children, "most prompts x n of one request"),
        ("--retries", serving.retries, "further attempts on other engines while nothing was sent"),
        ("--max-body-mib", 64, "largest request body"),
        ("--max-bodies-mib", 1024, "request bodies of all clients together; more get 503"),
        ("--max-passing", 64, "/tokenize, /detokenize and /v1/models under way; more get 503"),
    ):
        limits.add_argument(flag, type=int, default=count, help=f"{text} (default %(default)s)")


def config_from(args: argparse.Namespace) -> ProxyConfig:
    """Checks the arguments.

    Raises:
        ConfigError: a value is not usable.
    """
    _check_range("--port", args.port, 0, 65535)
    prefill = _addresses("prefiller", args.prefiller_hosts, args.prefiller_ports)
    decode = _addresses("decoder", args.decoder_hosts, args.decoder_ports)
    for flag in (
        "prefill_limit",
        "decode_limit",
        "max_waiting",
        "max_children",
        "max_body_mib",
        "max_bodies_mib",
        "max_passing",
    ):
        _check_range("--" + flag.replace("_", "-"), getattr(args, flag), 1, 1_000_000)
    if args.max_bodies_mib < args.max_body_mib:
        raise ConfigError(
            f"--max-bodies-mib: {args.max_bodies_mib} given, allowed are --max-body-mib ({args.max_body_mib}) and more"
        )
    _check_range("--retries", args.retries, 0, 10)
    for flag in (
        "queue_s",
        "prefill_queue_s",
        "rendezvous_s",
        "prefill_s",
        "ttl_s",
        "gather_window_s",
        "stream_idle_s",
        "client_stall_s",
        "meta_outage_s",
    ):
        value = getattr(args, flag)
        # The meta service keeps no rendezvous for longer.
        longest = 7_200 if flag == "ttl_s" else 86_400
        if not 0 < value <= longest:
            raise ConfigError(
                f"--{flag.replace('_', '-')}: {value:g} given, allowed are seconds above 0 and up to {longest}"
            )
    _check_meta(args)
    return ProxyConfig(
        host=args.host.strip("[]"),
        port=args.port,
        prefill=prefill,
        decode=decode,
        discover=args.discover or not (prefill and decode),
        meta_service=args.meta_service,
        meta_advertised=args.meta_service_for_decode or args.meta_service,
        meta_token=_token(args.meta_token_file),
        meta_ca=args.meta_ca,
        meta_cert=args.meta_cert,
        meta_key=args.meta_key,
        meta_server_name=args.meta_server_name,
        meta_outage_s=args.meta_outage_s,
        prefill_limit=args.prefill_limit,
        decode_limit=args.decode_limit,
        max_waiting=args.max_waiting,
        max_body_bytes=args.max_body_mib << 20,
        max_bodies_bytes=args.max_bodies_mib << 20,
        max_passing=args.max_passing,
        stream_idle_s=args.stream_idle_s,
        client_stall_s=args.client_stall_s,
        attempt=AttemptLimits(
            rendezvous_s=args.rendezvous_s,
            prefill_s=args.prefill_s,
            prefill_queue_s=args.prefill_queue_s,
            ttl_s=args.ttl_s,
            gather_window_s=args.gather_window_s,
        ),
        serving=ServingLimits(
            max_children=args.max_children,
            retries=args.retries,
            queue_s=args.queue_s,
            no_engine_s=args.meta_outage_s,
            recompute=RecomputeMode(args.recompute),
        ),
    )


def _check_range(flag: str, value: int, lowest: int, highest: int) -> None:
    if not lowest <= value <= highest:
        raise ConfigError(f"{flag}: {value} given, allowed are {lowest} to {highest}")


def _check_meta(args: argparse.Namespace) -> None:
    secure = bool(args.meta_ca or args.meta_cert)
    for flag in ("meta_service", "meta_service_for_decode"):
        text = getattr(args, flag)
        if text is None:
            continue
        try:
            target = parse_target(text)
        except AddressError as error:
            raise ConfigError(f"--{flag.replace('_', '-')}: {error}") from error
        secure = secure or (flag == "meta_service" and target.secure)
    if bool(args.meta_cert) != bool(args.meta_key):
        raise ConfigError("--meta-cert, --meta-key: only one given, allowed are both or neither")
    if args.meta_server_name and not secure:
        raise ConfigError(
            f"--meta-server-name: {args.meta_server_name!r} given without TLS, allowed only with a grpcs:// address, "
            "--meta-ca or --meta-cert"
        )


def _addresses(role: str, hosts: Sequence[str], ports: Sequence[int]) -> tuple[str, ...]:
    if len(hosts) != len(ports):
        raise ConfigError(
            f"--{role}-hosts, --{role}-ports: {len(hosts)} hosts and {len(ports)} ports given, "
            "one port for each host is expected"
        )
    addresses = []
    for host, port in zip(hosts, ports, strict=True):
        _check_range(f"--{role}-ports", port, 1, 65535)
        bare = host.strip("[]")
        try:
            # A zone ("fe80::1%eth0") is of use here, where nobody else has to understand it.
            check_advertised_host(bare.partition("%")[0])
        except AddressError as error:
            raise ConfigError(f"--{role}-hosts: {host!r} given, allowed is {error}") from error
        addresses.append(join_host_port(bare, port))
    if len(set(addresses)) != len(addresses):
        raise ConfigError(f"--{role}-hosts: {' '.join(addresses)} given, each address is allowed once")
    return tuple(addresses)


def _token(path: str | None) -> str | None:
    if path is None:
        return os.environ.get(ENV_META_TOKEN) or None
    try:
        with open(path, encoding="utf-8") as file:
            token = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--meta-token-file: {path} cannot be read ({error})") from error
    if not token:
        raise ConfigError(f"--meta-token-file: {path} is empty, one line with the token is expected")
    return token
