"""`rd2h proxy`: the command."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys

from rd2h_proxy import config as config_module
from rd2h_proxy.config import config_from
from rd2h_proxy.errors import ConfigError

EXIT_USAGE = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    config_module.add_arguments(parser)
    parser.add_argument(
        "--log-level", default="info", choices=("debug", "info", "warning", "error"), help="default %(default)s"
    )


def run(args: argparse.Namespace) -> int:
    """Serves until a signal; returns the exit code."""
    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr
    )
    try:
        settings = config_from(args)
        # Only now: --help and configuration errors must not need gRPC and aiohttp.
        from rd2h_proxy.service import serve

        asyncio.run(serve(settings, _announce))
    except ConfigError as error:
        print(f"rd2h proxy: {error}", file=sys.stderr)
        return EXIT_USAGE
    return 0


def _announce(line: str) -> None:
    print(line, flush=True)
