"""Blocks in any order of operations are what a model says that keeps a list for each block and nothing else."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jetcapture_py.archive import layout
from jetcapture_py.capture.blocks import BUFFER_OVERHEAD, CHUNK_OVERHEAD, TOGETHER, Block, Blocks
from jetcapture_py.capture.sealing import Amount, SealRules
from jetcapture_py.ledger import Ledger, Memory
from jetcapture_py.transform.keys import group
from tests.support.examples import examples
from tests.unit.capture.test_blocks import numbers_of, rows_of

Place = tuple[str | None, int, bool]
MAX_AGE = 10.0
ROW_OVERHEAD = 700
"""More than a row costs in its columns beside the payload."""
LARGEST_ROW = 3000 + ROW_OVERHEAD


@dataclass
class Model:
    """One block: the numbers of its rows in the order of arrival."""

    place: Place
    opened: float
    rows: list[int] = field(default_factory=list)
    reason: str = ""


def batch_of(numbers: list[int], firsts: list[bool], size: int, several: bool) -> pa.RecordBatch:
    """Rows with these numbers; `firsts` says which begin a message, if any message has `several`."""
    rows = rows_of(numbers, [b"%d " % number + b"x" * size for number in numbers])
    if several:
        places = np.arange(len(numbers)) - np.maximum.accumulate(np.where(firsts, np.arange(len(numbers)), 0))
        rows = rows.append_column(layout.ROW, pa.array(places, pa.int32()))
    return rows


OVERHEAD = CHUNK_OVERHEAD + BUFFER_OVERHEAD * sum(
    len(column.buffers()) for column in batch_of([0], [True], 0, several=True).columns
)
"""Bytes that a batch costs beside its rows: for the envelope's columns, those nested in them, and `_nats_row`."""


messages = st.lists(
    st.tuples(st.sampled_from([None, "a", "b", "c"]), st.sampled_from([0, 900]), st.sampled_from([1, 1, 1, 2, 5])),
    max_size=20,
)


class AnyOrder(RuleBasedStateMachine):
    """`limited`: blocks are limited in bytes, too, and where exactly they end is the code's to say."""

    limited = False
    together = TOGETHER

    @initialize(max_rows=st.integers(1, 30), max_bytes=st.sampled_from([1, 20_000, 60_000]))
    def begin(self, max_rows: int, max_bytes: int) -> None:
        self.max_rows = max_rows
        limit = max_bytes if self.limited else 1 << 40
        self.ledger = Ledger(Memory(1 << 30))
        self.blocks = Blocks(SealRules(max_age=MAX_AGE, max_bytes=limit, max_rows=max_rows), self.ledger)
        self.blocks.together = self.together
        self.now, self.next = 0.0, 0
        self.open: dict[Place, Model] = {}
        self.sealed: dict[Block, Model] = {}
        self.released: set[Block] = set()
        self.firsts: set[int] = set()  # the numbers of messages' first rows
        self.batches: list[tuple[range, int]] = []  # the numbers of each batch, and the size of its payloads

    def close(self, found: list[Block], expected: list[Model], reason: str) -> None:
        """`found` are sealed; so must be `expected`, in whatever order."""
        assert {block.sealed_by for block in found} <= {reason}
        wanted = {(model.place, tuple(model.rows)): model for model in expected}
        assert len(wanted) == len(expected) == len(found)
        for block in found:
            key = (block.id.key, block.id.bucket, block.id.quarantine), tuple(numbers_of(block))
            self.sealed[block] = wanted.pop(key)
            assert block.opened == self.sealed[block].opened

    @rule(
        batch=messages, size=st.sampled_from([0, 50, 3000]), quarantine=st.booleans(), later=st.sampled_from([0, 1, 3])
    )
    def add(self, batch: list[tuple[str | None, int, int]], size: int, quarantine: bool, later: int) -> None:
        self.now += later
        start, keys, buckets, firsts = self.next, [], [], []
        full: list[Model] = []
        batch = [(key, bucket, 1 if self.limited else count) for key, bucket, count in batch]
        several = any(count > 1 for _, _, count in batch)
        for key, bucket, count in batch:
            place = (key, bucket, quarantine)
            model = self.open.setdefault(place, Model(place, self.now))
            model.rows += range(self.next, self.next + count)
            if len(model.rows) >= self.max_rows and not self.limited:  # a message is never divided
                full.append(self.open.pop(place))
            self.firsts.add(self.next)
            self.next += count
            keys += [key] * count
            buckets += [bucket] * count
            firsts += [True] + [False] * (count - 1)
        if batch:
            self.batches.append((range(start, self.next), size))
        rows = batch_of(list(range(start, self.next)), firsts, size, several)
        grouped, runs = group(rows, pa.array(keys, pa.string()), np.array(buckets, np.int64))
        found = self.blocks.add(grouped, runs, self.now, quarantine=quarantine)
        if self.limited:
            self.take(found)
        else:
            self.close(found, full, "messages")

    def first_rows(self, model: Model) -> list[int]:
        """The numbers of the model's rows that are the first of their message."""
        return [number for number in model.rows if number in self.firsts]

    def take(self, found: list[Block]) -> None:
        """Believe where blocks end, if they are the heads of what was to be in them."""
        for block in found:
            place = (block.id.key, block.id.bucket, block.id.quarantine)
            numbers = numbers_of(block)
            model = self.open[place]
            assert model.rows[: len(numbers)] == numbers
            assert block.sealed_by == ("messages" if len(numbers) >= self.max_rows else "bytes")
            over = block.bytes - self.blocks.rules.max_bytes
            assert over <= LARGEST_ROW, "it takes what does not fit as its last row at most"
            assert over > -LARGEST_ROW or block.sealed_by == "messages"
            self.sealed[block] = Model(place, block.opened, numbers)
            model.rows, model.opened = model.rows[len(numbers) :], self.now
            if not model.rows:
                del self.open[place]

    @rule(later=st.sampled_from([0, 1, 7, 9, 10]))
    def seal_due(self, later: int) -> None:
        self.now += later
        due = [model for model in self.open.values() if self.now - model.opened >= MAX_AGE]
        self.open = {place: model for place, model in self.open.items() if model not in due}
        self.close(self.blocks.seal_due(self.now), due, "age")

    @rule(number=st.integers(-3, 40), count=st.integers(-1, 3), most=st.integers(-1, 4))
    def seal_largest(self, number: int, count: int, most: int) -> None:
        sizes = sorted((len(self.first_rows(model)) for model in self.open.values()), reverse=True)
        wanted: list[int] = []
        left = number
        while sizes and len(wanted) < most and (left > 0 or len(wanted) < count):
            wanted.append(sizes.pop(0))
            left -= wanted[-1]
        found = self.blocks.seal_largest(Amount(messages=number, blocks=count), most)
        assert sorted((block.messages for block in found), reverse=True) == wanted
        self.close(found, [self.open.pop((b.id.key, b.id.bucket, b.id.quarantine)) for b in found], "pressure")

    @rule(size=st.integers(1, 20_000))
    def seal_bytes(self, size: int) -> None:
        before = sorted((block.bytes for block in self.blocks if not block.sealed_by), reverse=True)
        found = self.blocks.seal_largest(Amount(bytes=size))
        taken = [block.bytes for block in found]
        assert taken == before[: len(taken)]
        assert sum(taken) >= size or len(taken) == len(before)
        assert sum(taken[:-1]) < size
        self.close(found, [self.open.pop((b.id.key, b.id.bucket, b.id.quarantine)) for b in found], "pressure")

    @rule()
    def seal_all(self) -> None:
        self.close(self.blocks.seal_all("drain"), list(self.open.values()), "drain")
        self.open = {}

    @precondition(lambda self: set(self.sealed) - self.released)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        block = data.draw(st.sampled_from([block for block in self.sealed if block not in self.released]))
        self.blocks.release(block)
        assert block.batches() == []
        self.released.add(block)

    @rule()
    def release_all(self) -> None:
        """As the store does with what is sealed; what lies open in the same batches stays."""
        for block in self.sealed:
            if block not in self.released:
                self.blocks.release(block)
                self.released.add(block)

    @precondition(lambda self: self.released)
    @rule(data=st.data())
    def forget(self, data: Any) -> None:
        block = data.draw(st.sampled_from([block for block in self.sealed if block in self.released]))
        replies = [reply for replies in block.replies() for reply in replies.to_pylist()]
        assert replies == [b"ack.%d" % number for number in self.first_rows(self.sealed.pop(block))]
        self.released.discard(block)
        self.blocks.forget(block)

    @invariant()
    def every_row_is_where_the_model_has_it(self) -> None:
        there = {(b.id.key, b.id.bucket, b.id.quarantine): b for b in self.blocks if not b.sealed_by}
        assert {place: numbers_of(block) for place, block in there.items()} == {
            place: model.rows for place, model in self.open.items()
        }
        for block, model in self.sealed.items():
            if block not in self.released:
                assert numbers_of(block) == model.rows

    @invariant()
    def counters_are_the_models(self) -> None:
        models = [*self.open.values(), *self.sealed.values()]
        assert self.blocks.open == len(self.open)
        assert self.blocks.sealed == len(self.sealed)
        assert self.blocks.rows == sum(len(model.rows) for model in self.open.values())
        assert self.blocks.messages == sum(len(self.first_rows(model)) for model in self.open.values())
        assert self.ledger.unacked == sum(len(self.first_rows(model)) for model in models)
        assert self.blocks.bytes == sum(block.bytes for block in self.blocks if not block.sealed_by)
        assert {block.rows - len(model.rows) for block, model in self.sealed.items()} <= {0}
        oldest = min((model.opened for model in self.open.values()), default=self.now)
        assert self.blocks.oldest_age(self.now) == self.now - oldest

    @invariant()
    def memory_is_that_of_the_rows_that_are_held(self) -> None:
        held: defaultdict[tuple[int, int], int] = defaultdict(int)  # rows by (batch, block); each is in one chunk
        for model in (*self.open.values(), *(self.sealed[b] for b in self.sealed if b not in self.released)):
            for number in model.rows:
                batch = next(at for at, (numbers, _) in enumerate(self.batches) if number in numbers)
                held[batch, id(model)] += 1
        least = sum(rows * self.batches[at][1] for (at, _), rows in held.items())
        dead = max((size for _, size in self.batches), default=0)  # a chunk keeps at most one dead row per live row
        most = sum(rows * (self.batches[at][1] + dead + 2 * ROW_OVERHEAD) + OVERHEAD for (at, _), rows in held.items())
        assert least <= self.blocks.memory <= most
        assert (self.blocks.memory == 0) == (not held)


class Limited(AnyOrder):
    limited = True


class Merged(AnyOrder):
    """Any two small chunks are merged."""

    together = 2


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = examples(steps=30)
TestLimited = Limited.TestCase
TestLimited.settings = examples(cost=8, steps=30)
TestMerged = Merged.TestCase
TestMerged.settings = examples(cost=4, steps=30)
