"""`rd2h status`: engines, leases, loads, rendezvous in flight and recent failures of a meta service."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import grpc

from rd2h_client.addresses import DEFAULT_TARGET, TARGET_VARIABLE, AddressError
from rd2h_client.channels import OptionsError
from rd2h_client.errors import MetaError
from rd2h_client.options import ClientOptions, TlsOptions
from rd2h_client.status_view import as_data, as_text
from rd2h_client.sync_client import SyncMetaClient

_EXIT_UNREACHABLE = 1
_EXIT_USAGE = 2
_SHORTEST_INTERVAL_S = 0.1
_LONGEST_S = 86_400
_CLEAR = "\x1b[H\x1b[2J"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `rd2h status`."""
    target = os.environ.get(TARGET_VARIABLE, DEFAULT_TARGET)
    parser.add_argument(
        "target",
        nargs="?",
        default=target,
        help=f"grpc://host:port or grpcs://host:port of the service (default: ${TARGET_VARIABLE} or {DEFAULT_TARGET})",
    )
    parser.add_argument("--json", action="store_true", help="print JSON; with --watch one object a line")
    parser.add_argument("--watch", action="store_true", help="show again and again until interrupted")
    parser.add_argument(
        "--interval-s", type=float, default=2.0, help="seconds between two looks, at least 0.1 (default: 2)"
    )
    parser.add_argument("--deadline-s", type=float, default=5.0, help="longest wait for an answer (default: 5)")
    parser.add_argument("--ca", metavar="FILE", help="PEM file with the authorities of the service's certificate")
    parser.add_argument("--cert", metavar="FILE", help="PEM file with a client certificate (mutual TLS)")
    parser.add_argument("--key", metavar="FILE", help="PEM file with the client's private key")
    parser.add_argument("--token-file", metavar="FILE", help="file with the bearer token")


def run(args: argparse.Namespace) -> int:
    """Run the command; return the exit status: 1 when the service does not answer, 2 for wrong arguments."""
    try:
        _check_times(args)
        client = SyncMetaClient(args.target, _options(args))
    except (AddressError, OptionsError) as error:
        print(f"rd2h status: {error}", file=sys.stderr)
        return _EXIT_USAGE
    with client:
        return _watch(client, args) if args.watch else _show(client, args)


def _watch(client: SyncMetaClient, args: argparse.Namespace) -> int:
    """Show until interrupted; a service that is away for a while is not the end."""
    try:
        while True:
            if not args.json and sys.stdout.isatty():
                print(_CLEAR, end="")
            _show(client, args)
            time.sleep(max(_SHORTEST_INTERVAL_S, args.interval_s))
    except KeyboardInterrupt:
        return 0


def _show(client: SyncMetaClient, args: argparse.Namespace) -> int:
    try:
        listed, stats = client.list_leases(), client.stats()
    except MetaError as error:
        why = client.connect_failure() if error.code is grpc.StatusCode.DEADLINE_EXCEEDED else ""
        print(f"rd2h status: {client.target.url}: {error}" + (f" ({why})" if why else ""), file=sys.stderr)
        return _EXIT_UNREACHABLE
    if args.json:
        print(json.dumps(as_data(listed, stats), indent=None if args.watch else 1), flush=True)
    else:
        print(as_text(listed, stats), end="", flush=True)
    return 0


def _check_times(args: argparse.Namespace) -> None:
    for flag, value_s in (("--interval-s", args.interval_s), ("--deadline-s", args.deadline_s)):
        if not 0 < value_s <= _LONGEST_S:  # nan is refused, too
            raise OptionsError(f"{flag}: got {value_s:g}, allowed: seconds above 0 and up to {_LONGEST_S}")


def _options(args: argparse.Namespace) -> ClientOptions:
    tls = TlsOptions(args.ca, args.cert, args.key) if args.ca or args.cert or args.key else None
    token = None
    if args.token_file:
        try:
            token = Path(args.token_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise OptionsError(f"--token-file: got {args.token_file!r}, which cannot be read: {error}") from error
    return ClientOptions(tls=tls, token=token, deadline_s=args.deadline_s)
