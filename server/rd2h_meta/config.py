"""Settings of `rd2h meta serve`: defaults, then a TOML file, then the environment, then flags."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from rd2h_client.addresses import AddressError, is_loopback, split_host_port

ENVIRONMENT_PREFIX = "RD2H_META_"
"""RD2H_META_LISTEN sets `listen`, and so on."""

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_ALLOWED = {"log_format": ("text", "json"), "log_level": ("debug", "info", "warning", "error")}


class ConfigError(ValueError):
    """A setting is wrong; one line that names setting, value and what is allowed."""


@dataclass(frozen=True)
class MetaConfig:
    """Settings of the meta service. Each has the flag `--name` with dashes."""

    listen: str = "127.0.0.1:7700"
    """host:port to serve on; port 0 picks a free one, an IPv6 literal is in brackets."""
    insecure_listen: bool = False
    """Allow a non-loopback address without TLS or without client authentication."""
    tls_cert: str = ""
    """PEM file with the server's certificate chain; needs tls_key."""
    tls_key: str = ""
    """PEM file with the server's private key."""
    tls_client_ca: str = ""
    """PEM file with the authorities of client certificates; makes TLS mutual."""
    token_file: str = ""
    """File with the bearer token that clients must send (surrounding space is ignored)."""
    metrics_listen: str = ""
    """host:port of the Prometheus endpoint /metrics; empty for none."""
    probe_listen: str = ""
    """host:port of a plain listener that serves grpc.health.v1 only, for probes without credentials; empty: none."""
    grace_s: float = 10.0
    """After SIGTERM: longest time for waiters to finish."""
    restart_grace_s: float = 10.0
    """After start: time in which absent engines are taken for not yet returned."""
    default_ttl_s: float = 15.0
    """Lease time of engines that wish none; 1 to 120."""
    max_engines: int = 10_000
    """Engines registered at a time."""
    max_open: int = 100_000
    """Rendezvous open at a time."""
    max_children: int = 4_096
    """Children of one rendezvous."""
    log_format: str = "text"
    """text or json."""
    log_level: str = "info"
    """debug, info, warning or error."""

    def check(self) -> None:
        """Check settings against each other.

        Raises:
            ConfigError: naming setting, value and what is allowed.
        """
        for name, allowed in _ALLOWED.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}: got {getattr(self, name)!r}, allowed: {', '.join(allowed)}")
        for name, lowest, highest in (("grace_s", 0, 3_600), ("restart_grace_s", 0, 3_600), ("default_ttl_s", 1, 120)):
            if not lowest <= getattr(self, name) <= highest:
                raise ConfigError(f"{name}: got {getattr(self, name)}, allowed: {lowest}..{highest} seconds")
        for name in ("max_engines", "max_open", "max_children"):
            if not 1 <= getattr(self, name) <= 10_000_000:
                raise ConfigError(f"{name}: got {getattr(self, name)}, allowed: 1..10000000")
        host, _ = parse_listen("listen", self.listen)
        for name in ("metrics_listen", "probe_listen"):
            if getattr(self, name):
                parse_listen(name, getattr(self, name))
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("tls_cert, tls_key: got only one, allowed: both or neither")
        if self.tls_client_ca and not self.tls_cert:
            raise ConfigError("tls_client_ca: got no tls_cert beside it, allowed: only with tls_cert and tls_key")
        protected = self.tls_cert and (self.tls_client_ca or self.token_file)
        if not (protected or is_loopback(host) or self.insecure_listen):
            raise ConfigError(
                f"listen: got {self.listen!r}, allowed without tls_cert and one of tls_client_ca, token_file: a "
                "loopback address; or say insecure_listen"
            )


def parse_listen(name: str, text: str) -> tuple[str, int]:
    """Return host (without brackets) and port of a listen address; the port may be 0.

    Raises:
        ConfigError: the text has another form.
    """
    free_port = text.endswith(":0")
    try:
        host, port = split_host_port(f"{text[:-2]}:1" if free_port else text)
    except AddressError as error:
        raise ConfigError(f"{name}: got {text!r}, allowed: {error}; port 0 takes a free one") from error
    return host, 0 if free_port else port


def load_config(flags: Mapping[str, object], environment: Mapping[str, str], file: str | None) -> MetaConfig:
    """Put the settings together; `flags` holds those that were given, `file` is a TOML file or None.

    Raises:
        ConfigError: naming setting, value and what is allowed.
    """
    values: dict[str, object] = {}
    if file:
        values.update(_read_file(file))
    for field in fields(MetaConfig):
        text = environment.get(ENVIRONMENT_PREFIX + field.name.upper())
        if text is not None:
            values[field.name] = text
    values.update(flags)
    known = {field.name: type(field.default) for field in fields(MetaConfig)}
    for name, value in values.items():
        if name not in known:
            raise ConfigError(f"{name}: got a setting that does not exist, allowed: {', '.join(known)}")
        values[name] = _convert(name, value, known[name])
    config = MetaConfig(**values)  # type: ignore[arg-type]  # converted to the fields' types above
    config.check()
    return config


def _read_file(file: str) -> dict[str, object]:
    try:
        return tomllib.loads(Path(file).read_text())
    except OSError as error:
        raise ConfigError(f"config: got {file!r}, which cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config: got {file!r}, which is not TOML: {error}") from error


def _convert(name: str, value: object, wanted: type) -> object:
    if isinstance(value, wanted) and not (wanted is int and isinstance(value, bool)):
        return value
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        if wanted is bool and value.lower() in _TRUE | _FALSE:
            return value.lower() in _TRUE
        if wanted in (int, float):
            try:
                return wanted(value)
            except ValueError:
                pass
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    raise ConfigError(f"{name}: got {value!r}, allowed: {names[wanted]}")
