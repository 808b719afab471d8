"""Objects in other formats than Parquet: named by their messages, the same bytes for the same rows."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from jetcapture_py.archive import block_writer, layout
from jetcapture_py.archive.block_writer import BlockWriter, TextWriter, UserWriter, make_writer
from jetcapture_py.archive.writer import EncodedBlock, Encoder
from tests.unit.archive.test_writer import BLOCK, ENCODER, batch, quarantined

TEXT = list(itertools.product(("ndjson", "csv"), ("none", "gzip", "zstd")))


class Lines:
    """A user's writer."""

    suffix = ".lines"

    def write(self, table: pa.Table) -> bytes:
        return "".join(f"{seq}\n" for seq in table[layout.SEQ].to_pylist()).encode()


def encoder(kind: TextWriter | UserWriter | None) -> Encoder:
    return replace(ENCODER, format=kind)


def write(kind: TextWriter | UserWriter, *batches: pa.RecordBatch) -> EncodedBlock:
    return encoder(kind).encode(BLOCK, "age", list(batches))


def opened(data: pa.Buffer, compression: str) -> bytes:
    if compression == "none":
        return bytes(data.to_pybytes())
    return bytes(pa.CompressedInputStream(pa.BufferReader(data), compression).read())


@pytest.mark.parametrize(("kind", "compression"), TEXT)
def test_the_name_ends_in_what_the_object_is_and_says_its_messages(kind: str, compression: str) -> None:
    rows = [batch([(5, 50), (3, 30)], a=["x", None]), batch([(4, 40), (3, 30)], a=["y", None])]
    found = write(TextWriter(kind, compression), *rows)
    parquet = ENCODER.encode(BLOCK, "age", rows)
    ending = {"none": "", "gzip": ".gz", "zstd": ".zst"}[compression]
    assert found.name == replace(parquet.name, suffix=f".{kind}{ending}")
    assert (found.messages, found.duplicates) == (parquet.messages, parquet.duplicates) == (3, 1)
    assert layout.parse_path(found.name.path) == found.name
    lines = opened(found.data, compression).decode().splitlines()
    if kind == "ndjson":
        assert [json.loads(line)[layout.SEQ] for line in lines] == [3, 4, 5]
        assert [json.loads(line)["a"] for line in lines] == [None, "y", "x"]
    else:
        assert lines[0].split(",") == [*layout.ENVELOPE, "a"]  # the key is in the path: Spark finds columns by position
        assert [line.split(",")[-1] for line in lines[1:]] == ["\\N", "y", "x"]


@pytest.mark.parametrize("kind", ["ndjson", "csv"])
def test_the_same_rows_make_the_same_bytes_in_any_pieces(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = batch([(seq, seq * 10) for seq in range(1000)], a=[f"text {seq % 7}" for seq in range(1000)])
    once = write(TextWriter(kind, "gzip"), whole)
    monkeypatch.setattr("time.time", lambda: 1e9)
    again = write(TextWriter(kind, "gzip"), whole.slice(500), whole.slice(0, 500))
    assert again.name == once.name
    assert again.data.equals(once.data)
    assert once.data.to_pybytes()[:8] == b"\x1f\x8b\x08\x00" + bytes(4), "no time"


def test_text_is_made_of_a_few_rows_at_a_time_also_if_their_names_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_writer, "PIECE", 1 << 16)
    sizes: list[int] = []
    lines = block_writer.json_lines
    monkeypatch.setattr(block_writer, "json_lines", lambda rows: [text := lines(rows), sizes.append(len(text))][0])
    names, rows = [f"{number:0200}" for number in range(100)], 200
    nested = pa.array([dict.fromkeys(names)] * rows, pa.struct(dict.fromkeys(names, pa.bool_())))
    flags = {name: [True, *[None] * (rows - 1)] for name in names}
    for columns in ({"a": ["x" * 20_000] * rows}, flags, {"a": nested}):
        sizes.clear()
        found = write(TextWriter("ndjson", "none"), batch([(seq, seq) for seq in range(rows)], **columns))
        assert found.data.size > rows * 20_000
        assert found.data.to_pybytes().count(b"\n") == rows
        assert max(sizes) < 64 * 22_000, "the size of the first piece, and much less than that of all rows"


def test_the_quarantine_is_parquet_whatever_the_format() -> None:
    block = replace(BLOCK, key=None, quarantine=True)
    found = encoder(TextWriter("csv", "gzip")).encode(block, "age", [quarantined([(1, 10)])])
    assert found.name.parquet
    assert found.data.to_pybytes()[:4] == b"PAR1"


class Failing:
    """A user's writer that fails as it is told."""

    suffix: Any = ".x"

    def __init__(self, outcome: Any) -> None:
        self._outcome = outcome

    def write(self, _: pa.Table) -> Any:
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome


class Panic(BaseException):
    """As polars raises it: PyO3's PanicException is not an Exception."""


def test_messages_whose_writer_fails_are_in_the_quarantine() -> None:
    for outcome in (ValueError("boom"), SystemExit("boom"), Panic("boom"), "text", None, b"", pa.py_buffer(b"")):
        found = encoder(UserWriter(Failing(outcome))).encode_or_salvage(BLOCK, "age", [batch([(1, 10), (2, 20)])])
        assert found.name.quarantine, outcome
        assert (found.name.parquet, found.messages) == (True, 2)


def test_a_users_writer_gets_sorted_rows_each_once_and_names_the_object() -> None:
    found = write(UserWriter(Lines()), batch([(2, 20), (1, 10)]), batch([(1, 10)]))
    assert found.data.to_pybytes() == b"1\n2\n"
    assert found.name.path.endswith(".lines")
    assert layout.parse_path(found.name.path) == found.name


def test_a_suffix_that_is_not_a_users_is_refused() -> None:
    writer = Failing(b"")
    for suffix in ("", "x", ".parquet", ".csv", ".csv.x", ".ndjson.gz", ".tmp", ".A", ".a.b.c", "./x", None, 1):
        writer.suffix = suffix
        with pytest.raises(ValueError, match="its suffix is"):
            UserWriter(writer)


def test_a_writer_is_an_object_a_class_or_a_function_and_anything_else_is_refused() -> None:
    for reference, problem in {
        "no_such_module:x": "cannot import no_such_module:x",
        "json:dumps": "json:dumps cannot be created",
        "math:pi": "math:pi is not a writer: it has no method write",
        "io:StringIO": "io:StringIO: its suffix is None",
    }.items():
        with pytest.raises(ValueError, match=problem):
            make_writer(reference, "zstd")
    for name in ("Lines", "LINES", "make_lines"):
        assert isinstance(make_writer(f"{__name__}:{name}", "zstd"), UserWriter)
    assert make_writer("parquet", "zstd") is None


LINES = Lines()


def make_lines() -> BlockWriter:
    return Lines()
