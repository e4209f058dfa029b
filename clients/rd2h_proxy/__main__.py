"""`python -m rd2h_proxy`."""

import argparse
import sys

from rd2h_proxy import cli


def main() -> int:
    """Parses the command line and runs."""
    parser = argparse.ArgumentParser(
        prog="rd2h proxy", description="OpenAI proxy in front of Prefill and Decode engines."
    )
    cli.add_arguments(parser)
    return cli.run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
