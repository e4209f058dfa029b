"""Reads counters from an engine's /metrics page."""

import re
import urllib.request
from dataclasses import dataclass

from rd2h.errors import Rd2hError

_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)$")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Sample:
    """One line of a metrics page."""

    name: str
    labels: dict[str, str]
    value: float


class Counters:
    """All samples of one page."""

    def __init__(self, samples: list[Sample]) -> None:
        self._samples = samples

    @classmethod
    def parse(cls, text: str) -> "Counters":
        """Parses the Prometheus text format; lines that are not samples are ignored."""
        samples = []
        for line in text.splitlines():
            found = _SAMPLE.match(line)
            if found and not line.startswith("#"):
                samples.append(Sample(found[1], dict(_LABEL.findall(found[2] or "")), float(found[3])))
        return cls(samples)

    @classmethod
    def read(cls, url: str) -> "Counters":
        """Reads `url`/metrics."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{url}/metrics", timeout=_TIMEOUT_S) as answer:
            return cls.parse(answer.read().decode())

    def total(self, name: str, **labels: str) -> float:
        """Sum over the samples of that name with those labels. Raises Rd2hError when there are none."""
        values = self._values(name, labels)
        if not values:
            raise Rd2hError(f"the metrics page has no {name} with {labels or 'any labels'}")
        return sum(values)

    def total_so_far(self, name: str, **labels: str) -> float:
        """Like `total`, but 0 when there are none: a labelled counter appears only once it has counted."""
        return sum(self._values(name, labels))

    def _values(self, name: str, labels: dict[str, str]) -> list[float]:
        return [
            sample.value for sample in self._samples if sample.name == name and labels.items() <= sample.labels.items()
        ]

    def labelled(self, name: str) -> list[dict[str, str]]:
        """Labels of every sample of that name."""
        return [sample.labels for sample in self._samples if sample.name == name]


@dataclass(frozen=True)
class PromptCounters:
    """Where the prompt tokens of an engine came from, and the bytes it pulled."""

    computed_tokens: int
    cached_tokens: int
    external_tokens: int
    pulled_bytes: int

    @classmethod
    def read(cls, url: str) -> "PromptCounters":
        """Reads a Decode engine's counters."""
        page = Counters.read(url)

        def prompt_tokens(source: str) -> int:
            return int(page.total("vllm:prompt_tokens_by_source_total", source=source))

        return cls(
            computed_tokens=int(page.total_so_far("rd2h_prompt_tokens_computed_total")),
            cached_tokens=prompt_tokens("local_cache_hit"),
            external_tokens=prompt_tokens("external_kv_transfer"),
            pulled_bytes=int(page.total_so_far("rd2h_pulled_bytes_total")),
        )

    def __sub__(self, earlier: "PromptCounters") -> "PromptCounters":
        return PromptCounters(
            self.computed_tokens - earlier.computed_tokens,
            self.cached_tokens - earlier.cached_tokens,
            self.external_tokens - earlier.external_tokens,
            self.pulled_bytes - earlier.pulled_bytes,
        )
