"""Who may talk to the service: TLS, mutual TLS and a bearer token."""

from __future__ import annotations

import hmac
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc

from rd2h_meta.config import ConfigError, MetaConfig

_HEALTH_PREFIX = "/grpc.health.v1.Health/"


def server_credentials(config: MetaConfig) -> grpc.ServerCredentials | None:
    """Return the TLS credentials that the settings ask for, or None for plain text.

    Raises:
        ConfigError: a file cannot be read, or does not hold what it should.
    """
    if not config.tls_cert:
        return None
    client_ca = _read("tls_client_ca", config.tls_client_ca) if config.tls_client_ca else None
    pair = (_read("tls_key", config.tls_key), _read("tls_cert", config.tls_cert))
    _check_certificates(config)
    return grpc.ssl_server_credentials([pair], root_certificates=client_ca, require_client_auth=client_ca is not None)


def _check_certificates(config: MetaConfig) -> None:
    """gRPC itself would only say that it cannot listen."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # The empty password keeps OpenSSL from asking for one on a terminal.
        context.load_cert_chain(config.tls_cert, config.tls_key, password="")
    except ssl.SSLError as error:
        raise ConfigError(
            f"tls_cert, tls_key: got {config.tls_cert!r} and {config.tls_key!r}, allowed: a certificate chain and its "
            f"unencrypted private key as PEM ({error})"
        ) from error
    if config.tls_client_ca:
        try:
            context.load_verify_locations(config.tls_client_ca)
        except ssl.SSLError as error:
            raise ConfigError(
                f"tls_client_ca: got {config.tls_client_ca!r}, allowed: certificates as PEM ({error})"
            ) from error


def read_token(config: MetaConfig) -> str:
    """Return the bearer token, or "" when none is asked for.

    Raises:
        ConfigError: the file cannot be read or holds no usable token.
    """
    if not config.token_file:
        return ""
    token = _read("token_file", config.token_file).decode(errors="replace").strip()
    if not token or not token.isascii() or not token.isprintable():
        raise ConfigError(f"token_file: got {config.token_file!r} without a token, allowed: printable ASCII")
    return token


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Refuses every call without the right bearer token, except health checks: probes cannot send one."""

    def __init__(self, token: str) -> None:
        self._wanted = f"Bearer {token}".encode()
        self.refused_total = 0
        """Calls refused since the start."""

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_HEALTH_PREFIX):
            return handler
        given = dict(handler_call_details.invocation_metadata).get("authorization", "")
        given_bytes = given.encode() if isinstance(given, str) else given
        if hmac.compare_digest(given_bytes, self._wanted):
            return handler
        self.refused_total += 1
        return _refusal(handler)


def _refusal(handler: Any) -> Any:
    """Return a handler of the same kind that refuses. The message tells nothing about the token."""

    async def refuse(request: object, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "a valid bearer token is required")

    async def refuse_stream(request: object, context: Any) -> Any:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "a valid bearer token is required")
        yield  # an asynchronous generator, as streams need

    if handler.request_streaming:
        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else (grpc.stream_unary_rpc_method_handler)
        )
    else:
        make = (
            grpc.unary_stream_rpc_method_handler
            if handler.response_streaming
            else (grpc.unary_unary_rpc_method_handler)
        )
    behavior = refuse_stream if handler.response_streaming else refuse
    return make(behavior, handler.request_deserializer, handler.response_serializer)


def _read(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: got {path!r}, which cannot be read: {error.strerror}") from error
