"""`rd2h probe prefill|decode`: checks registration and reads between two endpoints, without vLLM.

Start `prefill` first; it prints one JSON line with the address it listens on. Then start `decode` with that address.
Both exit 0 when every byte arrived where it should and nowhere else, 1 when not, 2 when the probe could not be run.
"""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Sequence

from rd2h.errors import Rd2hError
from rd2h.probing.settings import PROBE_BACKENDS, ProbeSettings

EXIT_NOT_RUN = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the two roles and their options."""
    roles = parser.add_subparsers(dest="role", required=True, metavar="prefill|decode")
    prefill = roles.add_parser("prefill", help="register a patterned buffer and wait for a decode side to read it")
    prefill.add_argument("--listen", default="127.0.0.1:0", help="host:port for the decode side (default %(default)s)")
    prefill.add_argument("--size-mib", type=float, default=64, help="size of the buffer (default %(default)s)")
    decode = roles.add_parser("decode", help="read from a prefill side, check every byte, print bandwidth")
    decode.add_argument("--connect", required=True, help="host:port that the prefill side printed")
    decode.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    decode.add_argument("--max-mib", dest="size_mib", type=float, default=4096, help="refuse a larger offer of Prefill")
    for role in (prefill, decode):
        role.add_argument("--backend", choices=PROBE_BACKENDS, default="host", help="engine (default %(default)s)")
        role.add_argument("--protocol", default="sdma", help="memfabric: sdma, device_rdma, device_urma")
        role.add_argument("--hostname", default="127.0.0.1", help="memfabric: address of this host for the peer")
        role.add_argument("--device-id", type=int, default=0, help="memfabric: NPU number (default %(default)s)")
        role.add_argument("--store-url", default=None, help="memfabric: config store (default tcp://HOSTNAME)")
        role.add_argument("--memory", choices=("cpu", "npu"), default=None, help="default: npu for memfabric")
        role.add_argument("--block-kib", type=float, default=128, help="block size of the blocks case")
        role.add_argument("--iterations", type=int, default=5, help="reads of each case (default %(default)s)")
        role.add_argument("--timeout-s", type=float, default=60, help="bound of every wait (default %(default)s)")
        role.add_argument("--seed", type=int, default=secrets.randbits(32), help="of pattern and order; random")


def run(args: argparse.Namespace) -> int:
    """Run one side. Returns the exit code."""
    try:
        settings = ProbeSettings.from_arguments(args)
        if args.role == "prefill":
            from rd2h.probing.prefill import run_prefill

            return run_prefill(settings)
        from rd2h.probing.decode import run_decode

        return run_decode(settings, args.json)
    except Rd2hError as error:
        print(f"rd2h probe {args.role}: {error}", file=sys.stderr, flush=True)
        return EXIT_NOT_RUN


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `python -m rd2h.probe`."""
    parser = argparse.ArgumentParser(prog="rd2h probe", description=(__doc__ or "").partition("\n\n")[2])
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
