"""Prefill's worker half: turns a step's publications into per-endpoint chunks and drives the publisher by layer."""

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence

import numpy as np

from rd2h.errors import TopologyError
from rd2h.gates import ALL_BLOCKS, ChunkBlocks, Slot
from rd2h.layout import CacheLayout
from rd2h.params import RemoteDecode
from rd2h.prefill.device import RecordEvent, WaitForDevice
from rd2h.prefill.endpoint import EndpointChunk, EndpointKey
from rd2h.prefill.loads import LOAD_FAILED, HeldChunk
from rd2h.prefill.publisher import Publisher
from rd2h.stats import TransferStats
from rd2h.steps import ChildFailure, PrefillStep, Publication
from rd2h.timeline import Timeline
from rd2h.topology import TpMapping, rank_port
from rd2h.wire import ReadRequest, Refusal, encode_read_requests

MAX_REMEMBERED_CHILDREN = 65536
"""Children whose failure can still be named; the one that was published longest ago is forgotten first."""
LOADS_UNKNOWN = "Prefill was not told which blocks were loaded"


class PrefillWorker:
    """See the module. ``slots[i]`` are the physical slots of layer ``i``; ``record_event`` is None on a CPU.

    With ``beside_loaders`` every step is followed by ``loads_known``, and prompts are complete only then.
    """

    def __init__(
        self,
        layout: CacheLayout,
        slots: Sequence[tuple[Slot, ...]],
        tp_rank: int,
        tp_size: int,
        publisher: Publisher,
        stats: TransferStats,
        timeline: Timeline,
        record_event: RecordEvent | None = None,
        beside_loaders: bool = False,
    ) -> None:
        self._record_event, self._beside_loaders = record_event, beside_loaders
        self._held: list[HeldChunk] = []
        self._invalid: Collection[int] | None = None
        """Blocks of this step that could not be loaded, once that is known."""
        self._publications: dict[EndpointChunk, Sequence[Publication]] = {}
        self._layout, self._slots, self._tp_rank, self._tp_size = layout, slots, tp_rank, tp_size
        self._publisher, self._stats, self._timeline = publisher, stats, timeline
        self._index_of = layout.index_of()
        self.buffers_are_shared = len({slot for layer in slots for slot in layer}) < sum(len(layer) for layer in slots)
        self._chunks: list[EndpointChunk] = []
        self._published: set[int] = set()
        self._children: OrderedDict[bytes, RemoteDecode] = OrderedDict()
        self._failed_lock = threading.Lock()
        self._failed: list[ChildFailure] = []

    @property
    def alive(self) -> bool:
        """Whether the publisher's thread runs."""
        return self._publisher.alive

    @property
    def remembered_children(self) -> int:
        """Children whose failure can still be named."""
        return len(self._children)

    def before_writes(self, step: PrefillStep) -> None:
        """Wait until no Decode may still read what this step overwrites. Comes before anything else of the step."""
        self._drop_held(LOADS_UNKNOWN)
        self._publisher.wait_writable(None, step.writes)

    def begin(self, step: PrefillStep) -> None:
        """Prepare the chunks of a step, once for all its layers."""
        self._published.clear()
        self._invalid = None
        self._drop_held(LOADS_UNKNOWN)
        for failure in step.failures:
            self._send_failure(failure)
        by_endpoint: dict[tuple[EndpointKey, TpMapping], list[Publication]] = {}
        for publication in step.publications:
            child = publication.child
            if child.token is not None and self._publisher.stopped(child.token) is not None:
                continue
            try:
                mapping = TpMapping.of(self._tp_size, child.tp_size)
                by_endpoint.setdefault((self._key(child, mapping), mapping), []).append(publication)
            except TopologyError as error:
                self.on_failure([Refusal(child.token or b"", str(error))], child)
        self._publications = {self._chunk(*peer, members): members for peer, members in by_endpoint.items()}
        self._chunks = list(self._publications)

    def layer_written(self, layer_name: str) -> None:
        """A layer's KV is in the cache: close its gates and publish it. Once per layer and step.

        Runtimes also call this for an indexer, or without a name; ``end`` notices a layer that is never announced.
        """
        index = self._index_of.get(layer_name)
        if index is not None:
            self._publish(index)

    def end(self) -> None:
        """The forward is over, or was broken off: layers that no hook announced may hold anything, so they are not
        published and their children fail."""
        missing = len(self._layout.layers) - len(self._published)
        if self._chunks and missing:
            reason = f"Prefill did not compute {missing} of {len(self._layout.layers)} layers of a chunk"
            for chunk in self._chunks:
                failures = [Refusal(token, reason) for token in chunk.tokens]
                self.on_failure(failures)
                self._publisher.fail_children(chunk.key, failures)
        self._chunks = []

    def loads_known(self, invalid: Collection[int]) -> None:
        """The forward is over, and these main blocks could not be loaded by a connector beside ours."""
        self._invalid = invalid
        held, self._held = self._held, []
        for item in held:
            broken = [publication.child.token for publication in item.broken_by(invalid)]
            if broken and item.chunk.key.generation is None:
                item.settle(LOAD_FAILED)  # a legacy Decode cannot be told of one request alone
                continue
            if broken:
                # Before the end, so that Decode refuses it for these.
                refusals = [Refusal(token, LOAD_FAILED) for token in broken if token is not None]
                self._publisher.fail_children(item.chunk.key, refusals)
            item.settle()

    def close(self) -> None:
        """Nothing is held back any more, nor told."""
        self._drop_held("Prefill ends")

    def wait_layer(self, layer_idx: int) -> None:
        """Wait for all readers of a layer's physical buffers, whichever blocks they read; for all, if no such layer."""
        slots = self._slots[layer_idx] if 0 <= layer_idx < len(self._slots) else None
        self._publisher.wait_writable(slots, ALL_BLOCKS)

    def before_layer(self, layer_name: str) -> None:
        """Runs before a layer writes, where vLLM's hook allows it: needed only where layers share buffers."""
        index = self._index_of.get(layer_name)
        if self.buffers_are_shared and index is not None:
            self.wait_layer(index)

    def on_failure(self, refusals: Sequence[Refusal], child: RemoteDecode | None = None) -> None:
        """Children that will get no more KV; reported to the scheduler half with the next step. Any thread."""
        with self._failed_lock:
            for refusal in refusals:
                known = child or self._children.pop(refusal.token, None)
                if known is not None:
                    self._failed.append(ChildFailure(known, refusal.reason))

    def contacting(self) -> bool:
        """Whether children of this or an earlier step may still fail at a Decode that has not answered at all.

        Asked before ``take_failures``, a False says that these are all.
        """
        return bool(self._chunks) or self._publisher.contacting()

    def take_failures(self) -> list[ChildFailure]:
        """Failures since the last call."""
        with self._failed_lock:
            failed, self._failed = self._failed, []
        return failed

    def _publish(self, index: int) -> None:
        if index in self._published or not self._chunks:
            return
        self._published.add(index)
        last = index == len(self._layout.layers) - 1
        after = self._record_event() if self._record_event is not None else None
        if last and self._beside_loaders:
            self._publish_end(index, after)
        else:
            self._publisher.publish(index, self._chunks, last_layer=last, after=after)
        if self._timeline.enabled:
            children = [child_id for chunk in self._chunks for child_id in chunk.child_ids]
            self._timeline.event("ready_sent", layer=index, requests=children)

    def _publish_end(self, index: int, after: WaitForDevice | None) -> None:
        completing = [chunk for chunk in self._chunks if chunk.done_ids]
        others = [chunk for chunk in self._chunks if not chunk.done_ids]
        self._publisher.publish(index, others, last_layer=True, after=after)
        for chunk in completing:
            held = HeldChunk(chunk, self._publications[chunk], after)
            self._held.append(held)
            self._publisher.publish(index, [chunk], last_layer=True, after=held.wait)
        if self._invalid is not None:  # the last layer belongs to a draft model, which runs later
            self.loads_known(self._invalid)

    def _drop_held(self, reason: str) -> None:
        held, self._held = self._held, []
        for item in held:
            item.settle(reason)

    def _key(self, child: RemoteDecode, mapping: TpMapping) -> EndpointKey:
        port = rank_port(child.base_port, mapping.decode_rank(self._tp_rank))
        return EndpointKey(child.host, port, child.generation)

    def _chunk(self, key: EndpointKey, mapping: TpMapping, publications: Sequence[Publication]) -> EndpointChunk:
        legacy = key.generation is None
        with self._failed_lock:
            for publication in publications:
                if publication.child.token is not None:
                    self._children[publication.child.token] = publication.child
                    self._children.move_to_end(publication.child.token)
            while len(self._children) > MAX_REMEMBERED_CHILDREN:
                self._children.popitem(last=False)
        requests = [
            ReadRequest(
                publication.external_id if legacy else publication.child.request_id,
                np.asarray(publication.main_blocks, np.int64),
                np.asarray(publication.indexer_blocks, np.int64),
                publication.start_block,
                publication.start_block,
                publication.child.token,
            )
            for publication in publications
        ]
        final = [p for p in publications if p.final]
        return EndpointChunk(
            key,
            encode_read_requests([r for r in requests if len(r.main_blocks)], legacy_ids=legacy),
            ChunkBlocks(
                frozenset(block for p in publications for block in p.main_blocks),
                frozenset(block for p in publications for block in p.indexer_blocks),
            ),
            tuple(p.child.token for p in publications if p.child.token is not None),
            tuple(p.external_id if legacy else p.child.request_id for p in final),
            tuple(p.child.token for p in final if p.child.token is not None),
            mapping.member(self._tp_rank),
            mapping.ratio,
            tuple(p.child.request_id for p in publications),
        )

    def _send_failure(self, failure: ChildFailure) -> None:
        child = failure.child
        if child.token is None:
            return
        try:
            key = self._key(child, TpMapping.of(self._tp_size, child.tp_size))
        except TopologyError:
            return  # such a child was never connected to; the meta service carries the reason
        self._publisher.fail_children(key, [Refusal(child.token, failure.reason)])
