"""What happened when: reads the events that the connectors write and shows them beside the client's.

The connector appends one JSON object a line (rd2h/timeline.py):
{"t": unix seconds, "role": "P" | "D", "event": ..., "request": id, "layer": number, "bytes": number}.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

READ_EVENT = "layer_read"
_MAX_LINES = 40


@dataclass(frozen=True)
class Event:
    """One event; `layer` and `bytes` only where they make sense."""

    t_s: float
    role: str
    name: str
    request: str = ""
    layer: int | None = None
    bytes: int = 0

    @classmethod
    def from_json(cls, line: str) -> "Event":
        """Parses one line of a timeline file."""
        fields: dict[str, Any] = json.loads(line)
        return cls(
            t_s=float(fields["t"]),
            role=str(fields["role"]),
            name=str(fields["event"]),
            request=str(fields.get("request") or ""),
            layer=fields.get("layer"),
            bytes=int(fields.get("bytes") or 0),
        )


class TimelineFile:
    """Follows one engine's timeline file; each call returns what was appended since the last one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def new_events(self) -> list[Event]:
        """Complete lines only; a line that is still being written is left for the next call."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [Event.from_json(line) for line in whole.decode().splitlines()]


def pulled_bytes(events: Iterable[Event]) -> int:
    """Bytes of all layer reads."""
    return sum(event.bytes for event in events if event.name == READ_EVENT)


def render(events: Sequence[Event], start_s: float) -> list[str]:
    """One line an event, in order of time, milliseconds since `start_s`."""
    lines = []
    ordered = sorted(events, key=lambda event: event.t_s)
    for event in ordered[:_MAX_LINES]:
        detail = []
        if event.layer is not None:
            detail.append(f"layer {event.layer}")
        if event.name == READ_EVENT:
            detail.append(f"{event.bytes:,} bytes")
        if event.request and event.layer is None:
            detail.append(event.request)
        lines.append(f"{(event.t_s - start_s) * 1e3:9.1f} ms  {event.role:<6}  {event.name:<12}  {'  '.join(detail)}")
    if len(ordered) > _MAX_LINES:
        lines.append(f"{'':9}     ... {len(ordered) - _MAX_LINES} more")
    return [line.rstrip() for line in lines]
