"""Which children of a rendezvous are there, and when to send the next group of them to Prefill."""

from __future__ import annotations

from dataclasses import dataclass, field

from rd2h_client.v1.rendezvous_pb2 import Child


class BadAdvertError(ValueError):
    """An advert that does not belong to the request: an index out of range, or a second child for one place."""


@dataclass(slots=True)
class Gathering:
    """Children of one attempt.

    Normally all of them advertise and go to Prefill as one wave. When Decode cannot hold all at once, the rest
    advertise only after the first have been served; so when no advert has come for `window_s`, the ones that are
    there go first. Every child goes out exactly once. Times are seconds of one monotonic clock.
    """

    prompts: int
    n: int
    window_s: float
    waves: int = 0
    live: set[str] = field(default_factory=set)
    """Request ids of children that have been sent to Prefill and not ended."""
    served: bool = False
    """Whether a child has ended well."""
    dropped: bool = False
    """Whether the rendezvous was ended while children waited to be sent to Prefill."""
    _ended: set[str] = field(default_factory=set)
    _places: dict[tuple[int, int], str] = field(default_factory=dict)
    _waiting: dict[str, Child] = field(default_factory=dict)
    _last_advert_at: float = 0.0

    @property
    def expected(self) -> int:
        """Children that the request expands into."""
        return self.prompts * self.n

    @property
    def accounted(self) -> bool:
        """Whether every child has advertised or ended."""
        return len(self._places) >= self.expected

    @property
    def arrived(self) -> int:
        """Children that have advertised or ended."""
        return len(self._places)

    @property
    def all_ended(self) -> bool:
        """Whether each child has ended by itself, told one by one."""
        return len(self._ended) >= self.expected

    def advertised(self, child: Child, now: float) -> None:
        """Takes note of an advert; a repeated one changes nothing.

        Raises:
            BadAdvertError: see the class.
        """
        if not (child.prompt_index < self.prompts and child.choice_index < self.n):
            raise BadAdvertError(
                f"child {child.request_id}: prompt {child.prompt_index} choice {child.choice_index} advertised, "
                f"allowed are prompts below {self.prompts} and choices below {self.n}"
            )
        place = (child.prompt_index, child.choice_index)
        known = self._places.get(place)
        if known == child.request_id:
            return
        if known is not None:
            raise BadAdvertError(
                f"child {child.request_id}: prompt {place[0]} choice {place[1]} advertised, already taken by {known}"
            )
        self._places[place] = child.request_id
        self._waiting[child.request_id] = child
        self._last_advert_at = now

    def ended(self, request_id: str, prompt_index: int, choice_index: int, done: bool) -> bool:
        """A child ended, perhaps before it ever advertised. `done`: it has what it needs.

        Returns False for what cannot be: it wanted its KV, is said to have it, and Prefill has not been asked.
        """
        possible = not (done and request_id in self._waiting)
        self.served = self.served or (done and possible)
        self._ended.add(request_id)
        if prompt_index < self.prompts and choice_index < self.n:
            self._places.setdefault((prompt_index, choice_index), request_id)
        self._waiting.pop(request_id, None)
        self.live.discard(request_id)
        return possible

    def closed(self) -> None:
        """The meta service has ended the rendezvous: who still waits will not be served."""
        self.dropped = self.dropped or bool(self._waiting)
        self._waiting.clear()

    def completed(self) -> None:
        """The meta service says that all children have advertised or ended."""
        for prompt in range(self.prompts):
            for choice in range(self.n):
                self._places.setdefault((prompt, choice), "")

    def due_at(self) -> float | None:
        """When the next wave should go; None when no child waits for one."""
        if not self._waiting:
            return None
        return 0.0 if self.accounted else self._last_advert_at + self.window_s

    def take_wave(self) -> list[Child]:
        """The children of the next wave, in the order of prompts and choices. They will not be given out again."""
        wave = sorted(self._waiting.values(), key=lambda child: (child.prompt_index, child.choice_index))
        self._waiting.clear()
        self.live.update(child.request_id for child in wave)
        self.waves += 1
        return wave
