"""The end of a prompt is told only when it is known that a connector beside ours has loaded what it was to load.

vLLM asks for the blocks that could not be loaded when the forward is over. By then every layer has been published, and
Decode would take the prompt for complete and generate from it. So the last layer of a chunk that completes prompts is
held back until then: for the moment between the last layer and the end of the forward.
"""

import threading
from collections.abc import Collection, Sequence

from rd2h.errors import RequestError
from rd2h.prefill.device import WaitForDevice
from rd2h.prefill.endpoint import EndpointChunk
from rd2h.steps import Publication

LOAD_FAILED = "Prefill's KV of the prompt is incomplete: a connector beside it could not load some blocks"


class HeldChunk:
    """The last layer of one chunk for one endpoint; ``wait`` is what its message waits for."""

    def __init__(self, chunk: EndpointChunk, publications: Sequence[Publication], after: WaitForDevice | None) -> None:
        self.chunk, self._publications, self._after = chunk, publications, after
        self._settled = threading.Event()
        self._error = ""

    def wait(self) -> None:
        """Return when the message may go out. Raises RequestError if it may not, and what the device's wait raises."""
        if self._after is not None:
            self._after()
        self._settled.wait()
        if self._error:
            raise RequestError(self._error)

    def settle(self, error: str = "") -> None:
        """The message may go out; with ``error`` it may not."""
        self._error = error
        self._settled.set()

    def broken_by(self, invalid: Collection[int]) -> list[Publication]:
        """Publications of prompts that contain one of these main blocks."""
        lost = frozenset(invalid)
        return [publication for publication in self._publications if not lost.isdisjoint(publication.prompt_blocks)]
