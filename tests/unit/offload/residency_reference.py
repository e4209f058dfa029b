"""The obvious residency table: lists, dictionaries and loops, one row at a time."""

from dataclasses import dataclass, field


@dataclass
class ReferenceRow:
    order: list
    """(token or None, slot) from least to most recently used."""
    key: int = 0
    prefix: int = 0


@dataclass
class ReferencePlan:
    slots: list
    sources: list = field(default_factory=list)
    targets: list = field(default_factory=list)
    hits: int = 0
    evictions: int = 0


class ReferenceTable:
    def __init__(self, rows, capacity, block_size):
        self.capacity, self.block_size = capacity, block_size
        self.rows = [self._empty() for _ in range(rows)]

    def _empty(self):
        return ReferenceRow([(None, slot) for slot in range(self.capacity)])

    def clear(self):
        self.rows = [self._empty() for _ in self.rows]

    def plan(self, topk, keys, prefixes, tables):
        plan = ReferencePlan([[-1] * len(row) for row in topk])
        for number, (tokens, key) in enumerate(zip(topk, keys, strict=True)):
            if key != 0:
                self._plan_row(plan, number, tokens, key, prefixes[number], tables[number])
        return plan

    def _plan_row(self, plan, number, tokens, key, prefix, table):
        row = self.rows[number]
        if row.key != key:
            row = self.rows[number] = self._empty()
        limit = prefix if row.key == 0 else min(prefix, row.prefix)
        row.key, row.prefix = key, prefix

        wanted = list(dict.fromkeys(token for token in tokens if token >= 0))
        free, old, hits = [], [], []
        for token, slot in row.order:
            if token is None or token >= limit:
                free.append((None, slot))
            elif token in wanted:
                hits.append((token, slot))
            else:
                old.append((token, slot))
        slot_of = dict(hits)
        new = []
        for token in wanted:
            if token in slot_of:
                continue
            if free:
                _, slot = free.pop(0)
            else:
                _, slot = old.pop(0)
                plan.evictions += 1
            slot_of[token] = slot
            new.append((token, slot))
            plan.sources.append(table[token // self.block_size] * self.block_size + token % self.block_size)
            plan.targets.append(number * self.capacity + slot)
        row.order = free + old + new + hits
        plan.slots[number] = [slot_of.get(token, -1) for token in tokens]
        plan.hits += sum(token >= 0 for token in tokens) - len(new)

    def residents(self, row):
        return [(-1 if token is None else token, slot) for token, slot in self.rows[row].order]
