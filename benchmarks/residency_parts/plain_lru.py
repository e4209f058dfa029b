"""The plain Python way to plan residency: an OrderedDict for each row. What the planner is compared with."""

from collections import OrderedDict

from rd2h.offload.residency import Int32s, Int64s


class PlainTable:
    """Token to slot in order of use, per row; the same questions and answers as a residency table's for stable rows."""

    def __init__(self, rows: int, capacity: int, block_size: int) -> None:
        self._capacity, self._block_size = capacity, block_size
        self._held: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(rows)]

    def plan(self, topk: Int64s, block_tables: Int32s) -> tuple[list[list[int]], list[int], list[int]]:
        """Slots, source rows and target rows."""
        all_slots, sources, targets = [], [], []
        for row, (tokens, blocks) in enumerate(zip(topk.tolist(), block_tables.tolist(), strict=True)):
            held, slots, missing = self._held[row], [], []
            for column, token in enumerate(tokens):
                slot = held.get(token)
                if slot is None:
                    missing.append((column, token))
                    slot = -1
                else:
                    held.move_to_end(token)
                slots.append(slot)
            for column, token in missing:
                slot = len(held) if len(held) < self._capacity else held.popitem(last=False)[1]
                held[token] = slots[column] = slot
                sources.append(blocks[token // self._block_size] * self._block_size + token % self._block_size)
                targets.append(row * self._capacity + slot)
            all_slots.append(slots)
        return all_slots, sources, targets
