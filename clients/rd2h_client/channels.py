"""Channels to the meta service: credentials, keep-alive, retry policy."""

from __future__ import annotations

import json
from pathlib import Path

import grpc

from rd2h_client.addresses import Target, is_loopback
from rd2h_client.options import ClientOptions, TlsOptions

Metadata = tuple[tuple[str, str], ...]

MAX_REPLY_BYTES = 64 * 1024 * 1024
"""Largest message taken from the service: the list of all engines. gRPC's own limit (4 MiB) would end at some 1,500."""

_SERVICES = ("rd2h.meta.v1.EngineRegistry", "rd2h.meta.v1.Rendezvous")
_STREAMS = {
    "rd2h.meta.v1.EngineRegistry": ("WatchEngines",),
    "rd2h.meta.v1.Rendezvous": ("Exchange", "Await"),
}


class OptionsError(ValueError):
    """Client options contradict each other, or name a file that cannot be read."""


def channel_options(options: ClientOptions) -> list[tuple[str, object]]:
    """Return the channel arguments."""
    arguments: list[tuple[str, object]] = [
        ("grpc.keepalive_time_ms", round(options.keepalive.interval_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(options.keepalive.timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", round(options.retry.initial_backoff_s * 1000)),
        ("grpc.min_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", round(options.retry.max_backoff_s * 1000)),
        ("grpc.enable_retries", 1),
        ("grpc.max_receive_message_length", MAX_REPLY_BYTES),
        ("grpc.service_config", service_config(options)),
        # The service is local or configured by name; a proxy from the environment must not get in between.
        ("grpc.enable_http_proxy", 0),
    ]
    if options.tls and options.tls.server_name_override:
        arguments.append(("grpc.ssl_target_name_override", options.tls.server_name_override))
    return arguments


def service_config(options: ClientOptions) -> str:
    """Return gRPC's retry policy: unary calls only, all of which are idempotent; streams are kept by the client."""
    retry = options.retry
    policy = {
        "maxAttempts": max(2, min(5, retry.max_attempts)),
        "initialBackoff": f"{retry.initial_backoff_s:.3f}s",
        "maxBackoff": f"{retry.max_backoff_s:.3f}s",
        "backoffMultiplier": 2,
        # RESOURCE_EXHAUSTED is retried by the clients: gRPC would hide the reason when the deadline comes.
        "retryableStatusCodes": ["UNAVAILABLE", "ABORTED"],
    }
    streams = [{"service": service, "method": name} for service, names in _STREAMS.items() for name in names]
    unary: dict[str, object] = {"name": [{"service": service} for service in _SERVICES]}
    if retry.max_attempts > 1:
        unary["retryPolicy"] = policy
    return json.dumps({"methodConfig": [unary, {"name": streams}]})


def channel_credentials(target: Target, options: ClientOptions) -> grpc.ChannelCredentials | None:
    """Return TLS credentials, or None for plain text.

    Raises:
        OptionsError: a file cannot be read, or the options contradict each other.
    """
    if not (target.secure or options.tls):
        return None
    tls = options.tls or TlsOptions()
    if bool(tls.cert_path) != bool(tls.key_path):
        raise OptionsError("tls.cert_path, tls.key_path: got only one, allowed: both or neither")
    return grpc.ssl_channel_credentials(
        root_certificates=_read("tls.ca_path", tls.ca_path),
        private_key=_read("tls.key_path", tls.key_path),
        certificate_chain=_read("tls.cert_path", tls.cert_path),
    )


def call_metadata(target: Target, options: ClientOptions) -> Metadata:
    """Return the metadata of every call.

    Raises:
        OptionsError: the token would cross a network in plain text.
    """
    if options.token is None:
        return ()
    if not options.token or not options.token.isascii() or not options.token.isprintable():
        raise OptionsError("token: got something unprintable or empty, allowed: printable ASCII")
    plain = not (target.secure or options.tls)
    if plain and not (is_loopback(target.host) or options.allow_plain_token):
        raise OptionsError(
            f"token: got one for {target.url!r}, which is neither TLS nor loopback, allowed: TLS, or allow_plain_token"
        )
    return (("authorization", f"Bearer {options.token}"),)


def _read(name: str, path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise OptionsError(f"{name}: got {path!r}, which cannot be read: {error.strerror}") from error
