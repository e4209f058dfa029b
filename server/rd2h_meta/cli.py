"""`rd2h meta serve` and `rd2h meta probe`."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from dataclasses import fields

from rd2h_meta.config import ENVIRONMENT_PREFIX, ConfigError, MetaConfig, load_config

_HELP = {
    "listen": "host:port to serve on; port 0 picks a free one",
    "insecure_listen": "allow a non-loopback address without TLS or without client authentication",
    "tls_cert": "PEM file with the server's certificate chain",
    "tls_key": "PEM file with the server's private key",
    "tls_client_ca": "PEM file with the authorities of client certificates (mutual TLS)",
    "token_file": "file with the bearer token that clients must send",
    "metrics_listen": "host:port of the Prometheus endpoint /metrics",
    "probe_listen": "host:port of a plain listener for gRPC health probes only",
    "grace_s": "seconds for waiters to finish after SIGTERM",
    "restart_grace_s": "seconds after start in which absent engines are taken for not yet returned",
    "default_ttl_s": "lease time of engines that wish none, in seconds",
    "max_engines": "engines registered at a time",
    "max_open": "rendezvous open at a time",
    "max_children": "children of one rendezvous",
    "log_format": "text or json",
    "log_level": "debug, info, warning or error",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `rd2h meta`."""
    commands = parser.add_subparsers(dest="meta_command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="run the meta service",
        description="Run the meta service. Every setting may also come from the environment "
        f"({ENVIRONMENT_PREFIX}LISTEN and so on) or from a TOML file; "
        "a flag wins over the environment, the environment over the file.",
    )
    _add_probe_arguments(commands.add_parser("probe", help="ask for the health of a service or an engine"))
    serve.add_argument("--config", metavar="FILE", help="TOML file with settings (underscores instead of dashes)")
    for field in fields(MetaConfig):
        flag = "--" + field.name.replace("_", "-")
        text = f"{_HELP[field.name]} (default: {field.default!r})"
        if isinstance(field.default, bool):
            serve.add_argument(flag, action="store_true", default=None, help=text)
        else:
            serve.add_argument(flag, metavar=type(field.default).__name__.upper(), default=None, help=text)


def _add_probe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", help="host:port, grpc://host:port or grpcs://host:port; best the probe listener")
    parser.add_argument(
        "--service",
        default="",
        help="whose health: empty for the service itself, 'liveness', or 'rd2h.engine.ENGINE_ID' for an engine",
    )
    parser.add_argument("--deadline-s", type=float, default=2.0, help="longest wait for an answer (default: 2)")
    parser.add_argument("--ca", metavar="FILE", help="PEM file with the authorities of the service's certificate")


def run(args: argparse.Namespace) -> int:
    """Run the command; return the exit status."""
    # gRPC's own lines on standard error would stand beside ours, which say the same in our words.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    if args.meta_command == "probe":
        from rd2h_meta.probe import run_probe

        return run_probe(args)
    return _run_serve(args)


def _run_serve(args: argparse.Namespace) -> int:
    flags = {field.name: getattr(args, field.name) for field in fields(MetaConfig)}
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        config = load_config(given, os.environ, args.config)
        return asyncio.run(_serve(config))
    except ConfigError as error:
        print(f"rd2h meta: {error}", file=sys.stderr)
        return 2


async def _serve(config: MetaConfig) -> int:
    # gRPC takes long to import; a wrong setting should not wait for it.
    from rd2h_meta.collector import settle_collector
    from rd2h_meta.logs import set_up_logging
    from rd2h_meta.server import MetaServer

    set_up_logging(config.log_format, config.log_level)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = MetaServer(config)
    await server.start()
    settle_collector()
    print(f"rd2h meta: serving on {server.address}", flush=True)
    if server.probe_address:
        print(f"rd2h meta: probes on {server.probe_address}", flush=True)
    if server.metrics_address:
        print(f"rd2h meta: metrics on http://{server.metrics_address}/metrics", flush=True)
    await stop.wait()
    await server.drain()
    return 0


if __name__ == "__main__":
    own_parser = argparse.ArgumentParser(prog="rd2h meta")
    add_arguments(own_parser)
    sys.exit(run(own_parser.parse_args()))
