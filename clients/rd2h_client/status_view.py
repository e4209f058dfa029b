"""What `rd2h status` shows, as plain data and as text."""

from __future__ import annotations

from rd2h_client.addresses import join_host_port
from rd2h_client.v1 import engine_registry_pb2 as er
from rd2h_client.v1 import rendezvous_pb2 as rv

_OUTCOMES = ("done", "aborted", "failed", "expired")
_COLUMNS = (
    *("ENGINE", "ROLE", "STATE", "HEALTH", "DATA PATH", "TP", "DP"),
    *("RUN", "WAIT", "PULL", "KV FREE", "LEASE", "AGE"),
)


def as_data(listed: er.ListEnginesResponse, stats: rv.GetRendezvousStatsResponse) -> dict[str, object]:
    """Return everything as a JSON object; times in seconds, sizes in tokens."""
    return {
        "service": {
            "id": listed.service_id,
            "uptime_s": stats.uptime_ms / 1000,
            "grace_remaining_s": listed.grace_remaining_ms / 1000,
            "revision": listed.revision,
            "exchange_streams": stats.exchange_streams,
        },
        "engines": [_engine(engine, lease) for engine, lease in zip(listed.engines, listed.leases, strict=False)],
        "rendezvous": {
            "open": stats.open,
            "live_children": stats.live_children,
            "waiters": stats.waiters,
            "remembered": stats.remembered,
            "totals": {name: stats.totals[name] for name in sorted(stats.totals)},
        },
        "recent_failures": [
            {
                "rendezvous_id": failure.rendezvous_id,
                "request_id": failure.request_id,
                "reason": failure.reason,
                "age_s": failure.age_ms / 1000,
            }
            for failure in stats.recent_failures
        ],
    }


def as_text(listed: er.ListEnginesResponse, stats: rv.GetRendezvousStatsResponse, failures: int = 10) -> str:
    """Return a page for a terminal, with at most `failures` recent failures."""
    lines = [f"service {listed.service_id}, up {_duration(stats.uptime_ms)}, revision {listed.revision}"]
    if listed.grace_remaining_ms:
        lines.append(f"just started: engines have {_duration(listed.grace_remaining_ms)} left to register again")
    lines += ["", *_engine_table(listed), ""]
    totals = ", ".join(f"{stats.totals[f'rendezvous_{name}']} {name}" for name in _OUTCOMES)
    lines.append(f"rendezvous: {stats.open} open with {stats.live_children} live children, {stats.waiters} waiters")
    lines.append(f"ended: {totals}")
    if stats.recent_failures:
        lines += ["", "recent failures:"]
        for failure in stats.recent_failures[:failures]:
            what = f"{failure.rendezvous_id} {failure.request_id}".strip()
            lines.append(f"  {_duration(failure.age_ms)} ago  {what}: {failure.reason}")
    return "\n".join(lines) + "\n"


def _engine(engine: er.Engine, lease: er.Lease) -> dict[str, object]:
    load = engine.load
    return {
        "engine_id": engine.engine_id,
        "generation": engine.generation,
        "role": _role(engine),
        "state": _state(engine),
        "data_path_ok": _data_path_ok(engine),
        "data_path_reason": engine.health.reason,
        "host": engine.host,
        "base_port": engine.base_port,
        "http_address": engine.http_address,
        "tp_size": engine.tp_size,
        "dp_rank": engine.dp_rank,
        "dp_size": engine.dp_size,
        "layout_fingerprint": engine.layout.fingerprint.hex(),
        "lease_ttl_s": lease.ttl_ms / 1000,
        "lease_remaining_s": lease.remaining_ms / 1000,
        "age_s": lease.age_ms / 1000,
        "load": {
            "running_requests": load.running_requests,
            "waiting_requests": load.waiting_requests,
            "pulling_requests": load.pulling_requests,
            "free_kv_tokens": load.free_kv_tokens,
            "total_kv_tokens": load.total_kv_tokens,
        }
        if engine.HasField("load")
        else None,
    }


def _engine_table(listed: er.ListEnginesResponse) -> list[str]:
    if not listed.engines:
        return ["no engines"]
    rows: list[tuple[str, ...]] = [_COLUMNS]
    for engine, lease in zip(listed.engines, listed.leases, strict=False):
        load = engine.load
        requests = (load.running_requests, load.waiting_requests, load.pulling_requests)
        free = f"{load.free_kv_tokens / load.total_kv_tokens:.0%}" if load.total_kv_tokens else "-"
        rows.append(
            (
                engine.engine_id,
                _role(engine),
                _state(engine),
                "ok" if _data_path_ok(engine) else f"BAD: {engine.health.reason}",
                join_host_port(engine.host, engine.base_port) if engine.base_port else "-",
                str(engine.tp_size),
                f"{engine.dp_rank}/{engine.dp_size}",
                *(str(count) if engine.HasField("load") else "-" for count in requests),
                free,
                f"{lease.remaining_ms / 1000:.1f}/{lease.ttl_ms / 1000:.0f} s",
                _duration(lease.age_ms),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _data_path_ok(engine: er.Engine) -> bool:
    return not engine.HasField("health") or engine.health.ok


def _role(engine: er.Engine) -> str:
    return er.EngineRole.Name(engine.role).removeprefix("ENGINE_ROLE_").lower()


def _state(engine: er.Engine) -> str:
    return er.EngineState.Name(engine.state).removeprefix("ENGINE_STATE_").lower()


def _duration(milliseconds: int) -> str:
    seconds = milliseconds / 1000
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3_600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3_600:.1f} h"
