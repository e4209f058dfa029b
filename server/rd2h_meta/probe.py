"""`rd2h meta probe`: one health check, for container health checks and scripts."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rd2h_client.addresses import AddressError, parse_target

_EXIT_NOT_SERVING = 1
_EXIT_USAGE = 2


def run_probe(args: argparse.Namespace) -> int:
    """Print the status; return 0 when it is SERVING, 1 when not or without an answer, 2 for wrong arguments."""
    try:
        target = parse_target(args.target)
    except AddressError as error:
        print(f"rd2h meta probe: {error}", file=sys.stderr)
        return _EXIT_USAGE
    try:
        authorities = Path(args.ca).read_bytes() if args.ca else None
    except OSError as error:
        print(f"rd2h meta probe: --ca: got {args.ca!r}, which cannot be read: {error.strerror}", file=sys.stderr)
        return _EXIT_USAGE
    if target.secure or authorities:
        channel = grpc.secure_channel(target.authority, grpc.ssl_channel_credentials(authorities))
    else:
        channel = grpc.insecure_channel(target.authority, [("grpc.enable_http_proxy", 0)])
    with channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            response = stub.Check(health_pb2.HealthCheckRequest(service=args.service), timeout=args.deadline_s)
        except grpc.RpcError as error:
            print(f"rd2h meta probe: {target.url}: {error.code().name}: {error.details()}", file=sys.stderr)
            return _EXIT_NOT_SERVING
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
    print(name)
    return 0 if response.status == health_pb2.HealthCheckResponse.SERVING else _EXIT_NOT_SERVING
