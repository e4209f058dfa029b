"""Optional event log for people: one JSON object a line, appended to the file that ``RD2H_TIMELINE`` names."""

import json
import os
import threading
import time
from typing import IO

ENVIRONMENT = "RD2H_TIMELINE"


class Timeline:
    """Appends events of one role; does nothing unless a path is given."""

    def __init__(self, role: str, path: str | None) -> None:
        self._role = role
        self._lock = threading.Lock()
        self._file: IO[str] | None = open(path, "a", buffering=1, encoding="utf-8") if path else None  # noqa: SIM115

    @classmethod
    def from_environment(cls, role: str) -> "Timeline":
        """A timeline to the file that the environment names, if any."""
        return cls(role, os.environ.get(ENVIRONMENT))

    @property
    def enabled(self) -> bool:
        """Whether events are written."""
        return self._file is not None

    def event(self, event: str, **details: object) -> None:
        """Write one event with the wall-clock time in seconds."""
        if self._file is not None:
            line = json.dumps({"t": time.time(), "role": self._role, "event": event, **details})
            with self._lock:
                self._file.write(line + "\n")
