"""A stand-in engine as a process that can be killed: `python proxy_standin_process.py decode|prefill ...`."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import uuid
from collections.abc import Callable
from typing import Any

from proxy_standins import DecodeStandIn, PrefillStandIn, Script
from rd2h_client.client import MetaClient


async def _program(args: argparse.Namespace) -> None:
    script = Script(**json.loads(args.script))
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    if args.role == "prefill":
        prefill = PrefillStandIn(script=script, keep_bodies=False, port=args.port)
        await prefill.start()
        print(f"ready {prefill.port}", flush=True)
        await stop.wait()
        await prefill.stop()
        return
    async with MetaClient(args.meta) as meta:
        engine_id = args.engine_id or f"decode-{uuid.uuid4().hex[:6]}"
        decode = DecodeStandIn(script=script, meta=meta, engine_id=engine_id, keep_bodies=False, port=args.port)
        await decode.start()
        print(f"ready {decode.port}", flush=True)
        await stop.wait()
        await decode.stop()


def main(run: Callable[[Any], None] = asyncio.run) -> None:
    """Starts one stand-in as a process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("prefill", "decode"))
    parser.add_argument("--meta", default="")
    parser.add_argument("--engine-id", default="")
    parser.add_argument("--script", default="{}")
    parser.add_argument("--port", type=int, default=0)
    run(_program(parser.parse_args()))


if __name__ == "__main__":
    main()
