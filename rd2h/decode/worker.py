"""Decode's worker half: hands destinations, aborts and failures to the puller and collects what has ended."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rd2h.children import ChildSpec, Outcome
from rd2h.decode.puller import Puller
from rd2h.steps import DecodeStep

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Results:
    """Requests to report to vLLM now: each once, failed ones in both sets, aborted ones in ``received`` only."""

    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class DecodeWorker:
    """See the module."""

    def __init__(self, puller: Puller) -> None:
        self._puller = puller
        self._refused: list[str] = []
        self._blocks: dict[str, Sequence[int]] = {}
        self._invalid_blocks: set[int] = set()
        self._reasons: dict[str, str] = {}
        self._ended: list[tuple[str, Sequence[int]]] = []

    @property
    def alive(self) -> bool:
        """Whether every thread of the data path runs."""
        return self._puller.alive

    def begin(self, step: DecodeStep) -> None:
        """Take in a step's metadata; never waits."""
        if step.prefill_generations is not None:
            self._puller.trust(step.prefill_generations)
        if step.pulls:
            self._puller.add(
                [
                    ChildSpec(
                        pull.token,
                        pull.request_id,
                        pull.external_id,
                        np.asarray(pull.main_blocks, np.int64),
                        pull.start_block,
                        np.asarray(pull.indexer_blocks, np.int64),
                        pull.start_block,
                    )
                    for pull in step.pulls
                ]
            )
            self._blocks.update({pull.request_id: pull.main_blocks for pull in step.pulls})
        if step.aborts:
            self._puller.abort(step.aborts)
        for token, reason in step.failures:
            self._puller.fail(token, reason)
        for refused in step.refused:
            self._refused.append(refused.request_id)
            self._blocks[refused.request_id] = refused.main_blocks

    def results(self) -> Results:
        """What has ended since the last call."""
        results = Results()
        results.received.update(self._refused)
        results.failed.update(self._refused)
        self._refused.clear()
        for finished in self._puller.take_finished():
            results.received.add(finished.request_id)
            if finished.outcome is Outcome.FAILED:
                logger.warning("rd2h: request %s failed: %s", finished.request_id, finished.reason)
                results.failed.add(finished.request_id)
                self._reasons[finished.request_id] = finished.reason
        self._ended = [(request_id, self._blocks.pop(request_id, ())) for request_id in results.received]
        return results

    def take_reasons(self) -> dict[str, str]:
        """Reasons of failed requests since the last call."""
        reasons, self._reasons = self._reasons, {}
        return reasons

    def results_with_invalid_blocks(self) -> set[str]:
        """``results`` for a vLLM that learns of failed requests by their blocks."""
        results = self.results()
        for request_id, blocks in self._ended:
            if request_id in results.failed:
                self._invalid_blocks.update(blocks)
        return results.received

    def take_invalid_blocks(self) -> set[int]:
        """Blocks of requests that ``results_with_invalid_blocks`` found failed, since the last call."""
        blocks, self._invalid_blocks = self._invalid_blocks, set()
        return blocks
