"""`rd2h status` against a real service."""

import asyncio
import json
import os
import subprocess
import sys

import pytest
from meta_harness import MetaProcess, child, engine
from rd2h_client import EngineStatus, MetaClient
from rd2h_client.v1 import engine_registry_pb2 as er


def status(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rd2h.cli", "status", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **(environment or {})},
        check=False,
    )


@pytest.fixture
async def busy_service(make_service):  # type: ignore[no-untyped-def]
    service: MetaProcess = make_service()
    load = er.Load(running_requests=3, waiting_requests=1, free_kv_tokens=25, total_kv_tokens=100)
    broken = er.DataPathHealth(ok=False, reason="reader thread died")
    async with MetaClient(service.target) as client:
        ill = await client.register(engine("decode-0", host="fd00::7"), lambda: EngineStatus(health=broken))
        registration = await client.register(engine("decode-1"), lambda: EngineStatus(load=load))
        registration.renew()
        await client.advertise("r", child("a"))
        await client.report_failure("s", "prefill answered 500", ["b"])
        async with asyncio.timeout(10.0):
            while not (await client.list_engines())[1].HasField("load"):
                await asyncio.sleep(0.05)
            ill.renew()
            while not (await client.list_engines())[0].HasField("health"):
                await asyncio.sleep(0.05)
        yield service


async def test_text(busy_service: MetaProcess) -> None:
    done = await asyncio.to_thread(status, busy_service.target)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    (first,) = [line for line in lines if line.startswith("decode-0")]
    (second,) = [line for line in lines if line.startswith("decode-1")]
    assert "BAD: reader thread died" in first
    assert "[fd00::7]:20050" in first
    assert second.split()[:4] == ["decode-1", "decode", "serving", "ok"]
    assert "25%" in second
    assert "rendezvous: 2 open with 1 live children" in done.stdout
    assert "s b: prefill answered 500" in done.stdout


async def test_json(busy_service: MetaProcess) -> None:
    done = await asyncio.to_thread(status, "--json", environment={"RD2H_META_SERVICE": busy_service.target})
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    first, second = data["engines"]
    assert (first["engine_id"], first["data_path_ok"], first["data_path_reason"]) == (
        "decode-0",
        False,
        "reader thread died",
    )
    assert second["load"]["running_requests"] == 3
    assert 0 < second["lease_remaining_s"] <= second["lease_ttl_s"] == 15.0
    assert data["rendezvous"]["live_children"] == 1
    assert data["recent_failures"][0]["reason"] == "prefill answered 500"


async def test_watch(busy_service: MetaProcess) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rd2h.cli", "status", "--watch", "--json", "--interval-s", "0.1", busy_service.target,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    async with asyncio.timeout(30.0):
        looks = [json.loads(await process.stdout.readline()) for _ in range(3)]
    process.terminate()
    await process.wait()
    assert looks[0]["service"]["uptime_s"] < looks[2]["service"]["uptime_s"]


def test_errors_are_one_line() -> None:
    done = status("grpc://127.0.0.1:1", "--deadline-s", "0.3")
    assert done.returncode == 1
    assert done.stderr.startswith("rd2h status: grpc://127.0.0.1:1: DEADLINE_EXCEEDED: no answer within 0.3 s (")
    assert "Connection refused" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    done = status("http://x")
    assert done.returncode == 2
    assert "allowed: the scheme grpc or grpcs" in done.stderr
    done = status("127.0.0.1:1", "--token-file", "/missing")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
