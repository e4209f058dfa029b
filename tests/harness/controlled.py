"""An engine around another one, whose reads a test delays, holds or spoils."""

import random
import threading
import time
from dataclasses import dataclass, field

from rd2h.engines import AddressArray, ReadResult, TransferEngine


@dataclass(slots=True)
class ReadControl:
    """What happens to reads of one session ("" stands for all others). Times in seconds."""

    before_s: float = 0.0
    after_s: float = 0.0
    """The bytes are there already, the call has not returned yet."""
    jitter_before_s: float = 0.0
    """Up to so much more before, at random."""
    jitter_after_s: float = 0.0
    fail_code: int = 0
    """Return this code instead of the result, and let the bytes land ``late_s`` after that."""
    late_s: float = 0.0


@dataclass
class ControlledEngine:
    """Passes everything on; ``hold`` stops reads before they begin until ``release``."""

    inner: TransferEngine
    controls: dict[str, ReadControl] = field(default_factory=dict)
    default: ReadControl = field(default_factory=ReadControl)
    started: int = 0
    returned: int = 0

    def __post_init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def hold(self) -> None:
        """Reads that begin from now on wait."""
        self._open.clear()

    def release(self) -> None:
        """Let held reads go on."""
        self._open.set()

    def batch_transfer_sync_read(
        self, session: str, local: AddressArray, peer: AddressArray, lengths: AddressArray
    ) -> ReadResult:
        """See TransferEngine."""
        with self._lock:
            self.started += 1
        control = self.controls.get(session, self.default)
        self._open.wait(60.0)
        time.sleep(control.before_s + random.uniform(0.0, control.jitter_before_s))
        if control.fail_code:
            if control.late_s:
                self._read_later(control.late_s, session, local, peer, lengths)
            result = ReadResult(control.fail_code, f"made to fail with {control.fail_code}")
        else:
            result = self.inner.batch_transfer_sync_read(session, local, peer, lengths)
        time.sleep(control.after_s + random.uniform(0.0, control.jitter_after_s))
        with self._lock:
            self.returned += 1
        return result

    def _read_later(
        self, delay_s: float, session: str, local: AddressArray, peer: AddressArray, lengths: AddressArray
    ) -> None:
        arguments = (session, local.copy(), peer.copy(), lengths.copy())
        timer = threading.Timer(delay_s, self.inner.batch_transfer_sync_read, arguments)
        timer.daemon = True
        timer.start()
