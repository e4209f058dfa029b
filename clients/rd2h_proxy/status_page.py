"""The status page: engines, and requests with the time they spent in each phase. Plain HTML from the server."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from html import escape

from rd2h_proxy.journal import Journal, RequestRecord
from rd2h_proxy.phase import Phase
from rd2h_proxy.pool import EnginePool
from rd2h_proxy.router import Router
from rd2h_proxy.target import Target

_REFRESH_S = 5
_SHOWN_IN_FLIGHT = 100

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --ok: #2a7d3f; --bad: #c0392b; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 75rem; margin: 1.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin-top: 1.8rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
td.number, th.number { text-align: right; }
.ok { color: var(--ok); } .bad { color: var(--bad); } .state { font-weight: 600; white-space: nowrap; }
.bar { display: flex; height: .8rem; min-width: 10rem; border-radius: 2px; overflow: hidden; background: var(--line); }
.bar span { min-width: 1px; }
.queued { background: #b0a990; } .rendezvous { background: #7f8fd1; }
.prefill { background: #d19a3f; } .streaming { background: #4f9f74; }
.key span { display: inline-block; width: .8rem; height: .8rem; margin: 0 .35rem 0 1rem; border-radius: 2px; }
code { font-size: .9em; }
"""
_PHASES = (Phase.QUEUED, Phase.RENDEZVOUS, Phase.PREFILL, Phase.STREAMING)


class StatusPage:
    """Renders the page from what the router and the journal hold."""

    def __init__(self, router: Router, journal: Journal) -> None:
        self._router = router
        self._journal = journal

    def render(self) -> str:
        """The whole document."""
        return "\n".join(self._parts())

    def _parts(self) -> Iterator[str]:
        router = self._router
        yield '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>rd2h proxy</title>'
        yield f'<meta name="viewport" content="width=device-width"><meta http-equiv="refresh" content="{_REFRESH_S}">'
        yield f"<style>{_STYLE}</style></head><body><h1>rd2h proxy</h1>"
        meta_state = _state(router.meta.connected, "connected", "not connected")
        yield f'<p id="status">{_state(router.serving, "serving", "not serving")}'
        yield f" &middot; meta service {meta_state} {_code(router.metaserver)}</p>"
        for title, pool in (("Prefill engines", router.prefill), ("Decode engines", router.decode)):
            yield from _engines(title, pool)
        running = sorted(self._journal.in_flight.values(), key=lambda record: record.life.began)
        key = "".join(f'<span class="{phase.value}"></span>{phase.value}' for phase in _PHASES)
        yield f'<h2>Requests in flight: <span id="in-flight">{len(running)}</span></h2><p class="key">{key}</p>'
        yield from _requests("running", running[:_SHOWN_IN_FLIGHT])
        yield "<h2>Last finished requests</h2>"
        yield from _requests("recent", self._journal.recent)
        yield "</body></html>"


def _state(good: bool, good_word: str, bad_word: str) -> str:
    return f'<span class="state {"ok" if good else "bad"}">{good_word if good else bad_word}</span>'


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def _table(table_id: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """A table of cells that are HTML already; a column whose name begins with # holds numbers."""
    kinds = [' class="number"' if column.startswith("#") else "" for column in columns]
    heads = "".join(f"<th{kind}>{column.removeprefix('#')}</th>" for kind, column in zip(kinds, columns, strict=True))
    yield f'<div class="scroll"><table id="{table_id}"><thead><tr>{heads}</tr></thead><tbody>'
    empty = True
    for row in rows:
        empty = False
        yield "<tr>" + "".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(kinds, row, strict=True)) + "</tr>"
    if empty:
        yield f'<tr><td colspan="{len(kinds)}">none</td></tr>'
    yield "</tbody></table></div>"


def _engines(title: str, pool: EnginePool) -> Iterator[str]:
    now = time.monotonic()

    def row(target: Target) -> Iterator[str]:
        reason = target.unusable_reason(now)
        yield _code(target.address)
        yield _state(reason is None, "usable", "out") + (f" {escape(reason)}" if reason else "")
        yield ", ".join(map(_code, sorted(target.engines))) or "not registered"
        yield target.breaker.state.value
        yield f"{target.in_flight} / {target.limit}"
        yield str(target.work_tokens)

    yield f"<h2>{title}</h2>"
    columns = ("Address", "State", "Engines", "Breaker", "#In flight", "#Work (tokens)")
    yield from _table(pool.role.value, columns, map(row, pool.targets))
    yield f"<p>{pool.waiting} requests wait for a place.</p>"


def _requests(table_id: str, records: Iterable[RequestRecord]) -> Iterator[str]:
    now = time.monotonic()

    def row(record: RequestRecord) -> Iterator[str]:
        end = record.life.since if record.life.phase.final else now
        yield f"{_code(record.request_id)}<br>{escape(record.path)}"
        yield _phase(record)
        yield _bar(record, now)
        yield _seconds(end - record.life.began)
        yield _seconds(record.first_byte_s)
        yield f"{escape(record.prefill or '-')} &rarr; {escape(record.decode or '-')}"
        yield f"{record.status or '-'} {escape(record.reason)}"

    columns = ("Request", "Phase", "Time in phases", "#Total", "#First byte", "Prefill &rarr; Decode", "Status")
    yield from _table(table_id, columns, map(row, records))


def _phase(record: RequestRecord) -> str:
    phase = record.life.phase
    if phase is Phase.FAILED:
        return _state(False, "", str(phase.value))
    return str(phase.value)


def _bar(record: RequestRecord, now: float) -> str:
    parts = list(record.life.history)
    if not record.life.phase.final:
        parts.append((record.life.phase, now - record.life.since))
    whole = sum(seconds for _, seconds in parts) or 1.0
    spans = "".join(
        f'<span class="{phase.value}" style="width:{seconds / whole:.2%}"'
        f' title="{phase.value} {_seconds(seconds)}"></span>'
        for phase, seconds in parts
    )
    return f'<div class="bar">{spans}</div>'


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
