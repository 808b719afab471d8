"""Decoders and key functions that do what users' code may do, as the messages ask them to."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa

from jetcapture_py.archive import layout
from jetcapture_py.transform.batch import Decoded, Failure, MessageBatch

GOOD = b"good"


class Unspeakable(Exception):  # noqa: N818
    """Its text cannot be had, and the attempt would end the process."""

    def __str__(self) -> str:
        sys.exit(4)


def _raising(error: BaseException) -> Callable[[MessageBatch], NoReturn]:
    def act(batch: MessageBatch) -> NoReturn:
        raise error

    return act


def _recursing(batch: MessageBatch) -> Any:
    return _recursing(batch)


def _column(column: pa.Array, *names: str) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([column] * len(names), names=list(names))


def _answer(make: Callable[[int], Any]) -> Callable[[MessageBatch], Any]:
    return lambda batch: make(len(batch))


def _fields(make: Callable[[int], Any], *names: str) -> Callable[[MessageBatch], Any]:
    return lambda batch: Decoded(fields=_column(make(len(batch)), *(names or ("a",))))


def _messages(make: Callable[[int], Any]) -> Callable[[MessageBatch], Any]:
    return lambda batch: Decoded(fields=_column(pa.nulls(len(batch), pa.int64()), "size"), messages=make(len(batch)))


def _failures(make: Callable[[int], Any]) -> Callable[[MessageBatch], Any]:
    return lambda batch: Decoded(
        fields=_column(pa.nulls(0, pa.int64()), "size"), messages=pa.array([], pa.int32()), failures=make(len(batch))
    )


def _text(data: bytes, ends: list[int]) -> pa.Array:
    offsets = pa.py_buffer(np.array([0, *ends], np.int32))
    return pa.Array.from_buffers(pa.string(), len(ends), [None, offsets, pa.py_buffer(data)])


RAISES: dict[str, Callable[[MessageBatch], Any]] = {
    "exit": _raising(SystemExit(3)),
    "exit with text": _raising(SystemExit("bye")),
    "interrupt": _raising(KeyboardInterrupt()),
    "generator exit": _raising(GeneratorExit()),
    "cancelled": _raising(asyncio.CancelledError()),
    "stop iteration": _raising(StopIteration()),
    "out of memory": _raising(MemoryError()),
    "recursion": _recursing,
    "group": _raising(BaseExceptionGroup("several", [SystemExit(1), ValueError("x")])),
    "unspeakable": _raising(Unspeakable()),
    "odd name": _raising(type("Odd\nname", (Exception,), {})("\ud800\x00")),
    "huge": _raising(ValueError("x" * 1_000_000)),
}
ANSWERS: dict[str, Callable[[MessageBatch], Any]] = {
    "none": _answer(lambda _: None),
    "text": _answer(lambda _: "text"),
    "type": _answer(lambda _: Decoded),
    "no fields": _answer(lambda _: Decoded(fields=None)),
    "table": _answer(lambda count: Decoded(fields=pa.table({"size": pa.nulls(count)}))),
    "too many rows": _fields(lambda count: pa.nulls(count + 1)),
    "too few rows": _fields(lambda count: pa.nulls(count - 1)),
    "repeated name": _fields(pa.nulls, "a", "a"),
    "repeated name in another case": _fields(pa.nulls, "a", "A"),
    "name of the envelope": _fields(pa.nulls, "_NATS_seq"),
    "name of a partition": _fields(pa.nulls, "Key"),
    "invalid UTF-8": _fields(lambda count: _text(b"\xff" * count, [*range(1, count + 1)])),
    "offsets beyond the data": _fields(lambda count: _text(b"a", [10**6] * count)),
    "union": _fields(lambda count: pa.UnionArray.from_sparse(pa.array([0] * count, pa.int8()), [pa.nulls(count)])),
    "empty struct": _fields(lambda count: pa.array([{}] * count, pa.struct([]))),
    "interval": _fields(lambda count: pa.nulls(count, pa.month_day_nano_interval())),
    "run ends": _fields(lambda count: pa.RunEndEncodedArray.from_arrays([count], pa.array([1]))),
    "messages as a list": _messages(lambda count: list(range(count))),
    "messages as text": _messages(lambda count: pa.array(["x"] * count)),
    "messages with null": _messages(lambda count: pa.array([None] * count, pa.int32())),
    "messages as fractions": _messages(lambda count: pa.array([0.5] * count)),
    "messages beyond the batch": _messages(lambda count: pa.array([count] * count, pa.int32())),
    "messages before the batch": _messages(lambda count: pa.array([-1] * count, pa.int32())),
    "messages far beyond": _messages(lambda count: pa.array([2**63] * count, pa.uint64())),
    "messages left out": _failures(lambda _: ()),
    "failures of nothing": _failures(lambda _: None),
    "failures as a number": _failures(lambda _: 7),
    "failures as text": _failures(lambda _: "ab"),
    "failures as pairs": _failures(lambda count: tuple((index, "decode", "x") for index in range(count))),
    "failure twice": _failures(lambda _: (Failure(index=0, stage="decode", error="x"),) * 2),
    "failure beyond": _failures(lambda count: (Failure(index=count, stage="decode", error="x"),)),
    "failure far beyond": _failures(lambda _: (Failure(index=10**30, stage="decode", error="x"),)),
    "failure before": _failures(lambda _: (Failure(index=-1, stage="decode", error="x"),)),
    "failure nowhere": _failures(lambda _: (Failure(index=None, stage="decode", error="x"),)),  # type: ignore[arg-type]
    "failure at text": _failures(lambda _: (Failure(index="0", stage="decode", error="x"),)),  # type: ignore[arg-type]
}
FAILURES: dict[str, tuple[Any, Any]] = {
    "no error": ("decode", None),
    "a number": ("decode", 7),
    "bytes": ("decode", b"\xff\n"),
    "a mapping": ("decode", {"code": 7}),
    "an exception": ("decode", ValueError("a\nb")),
    "an unspeakable one": ("decode", Unspeakable()),
    "much text": ("decode", "x" * 1_000_000),
    "a lone surrogate": ("decode", "\ud800"),
    "several lines": ("decode", "a\r\nb\x1b[2J\x00"),
    "nothing": ("decode", ""),
    "no stage": (None, "x"),
    "a stage that is no text": (7, "x"),
    "a long stage": ("s" * 1_000_000, "x"),
    "an odd stage": ("\ud800\n", "x"),
    "an empty stage": ("", "x"),
}
"""Stage and error of failures."""
KEYS: dict[str, Callable[[MessageBatch], Any]] = {
    **RAISES,
    "no keys": _answer(lambda _: None),
    "a list": _answer(lambda count: ["a"] * count),
    "too many": _answer(lambda count: pa.array(["a"] * (count + 1))),
    "numbers": _answer(lambda count: pa.array([1] * count)),
    "large text": _answer(lambda count: pa.array(["a"] * count, pa.large_string())),
    "chunks": _answer(lambda count: pa.chunked_array([["a"] * count])),
    "not UTF-8": _answer(lambda count: _text(b"\xff" * count, [*range(1, count + 1)])),
    "surrogate": _answer(lambda count: pa.array(["\ud800"] * count)),
    "beyond the data": _answer(lambda count: _text(b"a", [10**6] * count)),
    "too long": _answer(lambda count: pa.array(["x" * 1000] * count)),
}


class Misbehaving:
    """Decodes what is `GOOD`; for a message that is the name of a misbehaviour, does that for the whole batch."""

    def decode(self, batch: MessageBatch) -> Any:
        payloads = batch.column(layout.PAYLOAD).to_pylist()
        for name in (payload.decode() for payload in payloads):
            if (act := RAISES.get(name) or ANSWERS.get(name)) is not None:
                return act(batch)
        good = [index for index, payload in enumerate(payloads) if payload.startswith(GOOD)]
        bad = [(index, *FAILURES[payload.decode()]) for index, payload in enumerate(payloads) if index not in good]
        return Decoded(
            fields=pa.RecordBatch.from_pydict({"size": pa.array([len(payloads[index]) for index in good], pa.int64())}),
            messages=pa.array(good, pa.int32()),
            failures=tuple(Failure(index=index, stage=stage, error=error) for index, stage, error in bad),
        )


def misbehaving_key(batch: MessageBatch, fields: pa.RecordBatch) -> Any:
    """The key "k"; for a message whose subject ends with the name of a misbehaviour, that for the whole batch."""
    for subject in batch.column(layout.SUBJECT).to_pylist():
        if (act := KEYS.get(subject.rpartition(".")[2].replace("_", " "))) is not None:
            return act(batch)
    return pa.array(["k"] * len(batch))
