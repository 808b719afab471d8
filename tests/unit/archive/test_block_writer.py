"""Objects in other formats than Parquet: named by their messages, the same bytes for the same rows."""

from __future__ import annotations

import itertools
import json
import re
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
    assert found.name == replace(
        parquet.name, suffix=f".{kind}{ {'none': '', 'gzip': '.gz', 'zstd': '.zst'}[compression] }"
    )
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
def test_the_same_rows_make_the_same_bytes_at_any_time_and_in_any_pieces(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = batch([(seq, seq * 10) for seq in range(1000)], a=[f"text {seq % 7}" for seq in range(1000)])
    once = write(TextWriter(kind, "gzip"), whole)
    monkeypatch.setattr("time.time", lambda: 1e9)
    again = write(TextWriter(kind, "gzip"), whole.slice(500), whole.slice(0, 500))
    assert again.name == once.name
    assert again.data.equals(once.data)
    assert once.data.to_pybytes()[:8] == b"\x1f\x8b\x08\x00" + bytes(4), "no time"


def test_an_integer_that_no_double_holds_keeps_its_digits_beside_a_fraction() -> None:
    rows = [batch([(1, 10)], id=[2**53 + 1]), batch([(2, 20)], id=[0.5])]
    for kind, ids in {"ndjson": ['"9007199254740993"', '"0.5"'], "csv": ["9007199254740993", "0.5"]}.items():
        text = opened(write(TextWriter(kind, "none"), *rows).data, "none").decode()
        assert re.findall(r'(?:"id":|,)("?[0-9.]+"?)}?$', text, re.MULTILINE) == ids


def test_text_is_made_of_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_writer, "PIECE", 4096)
    sizes: list[int] = []
    lines = block_writer.json_lines
    monkeypatch.setattr(block_writer, "json_lines", lambda rows: [sizes.append(rows.nbytes), lines(rows)][1])
    rows = batch([(seq, seq) for seq in range(2000)], a=["x" * 100] * 2000)
    found = write(TextWriter("ndjson", "none"), rows)
    assert found.data.to_pybytes().count(b"\n") == 2000
    assert len(sizes) > 20
    assert max(sizes) < 16_384


def test_long_names_of_empty_columns_do_not_make_large_pieces_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_writer, "PIECE", 1 << 16)
    sizes: list[int] = []
    lines = block_writer.json_lines
    monkeypatch.setattr(block_writer, "json_lines", lambda rows: [text := lines(rows), sizes.append(len(text))][0])
    names = [f"{number:0200}" for number in range(100)]
    rows = 200
    nested = pa.array([dict.fromkeys(names)] * rows, pa.struct(dict.fromkeys(names, pa.bool_())))
    flags = [True, *[None] * (rows - 1)]
    for columns in (dict.fromkeys(names, flags), {"a": nested}):
        found = write(TextWriter("ndjson", "none"), batch([(seq, seq) for seq in range(rows)], **columns))
        assert found.data.size > rows * 20_000
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


class PanicsAtStart:
    """A user's writer that cannot be made."""

    def __init__(self) -> None:
        raise Panic("boom")


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


def test_what_is_not_a_writer_is_refused() -> None:
    for reference, problem in {
        "no_such_module:x": "cannot import no_such_module:x",
        "json:dumps": "json:dumps cannot be created",
        "math:pi": "math:pi is not a writer: it has no method write",
        "io:StringIO": "io:StringIO: its suffix is None",
        f"{__name__}:PanicsAtStart": r"PanicsAtStart cannot be created: .*boom",
    }.items():
        with pytest.raises(ValueError, match=problem):
            make_writer(reference, "zstd")


def test_a_writer_is_an_object_a_class_or_a_function() -> None:
    for name in ("Lines", "LINES", "make_lines"):
        assert isinstance(make_writer(f"{__name__}:{name}", "zstd"), UserWriter)
    assert make_writer("parquet", "zstd") is None


LINES = Lines()


def make_lines() -> BlockWriter:
    return Lines()


def test_rows_of_a_message_count_once() -> None:
    rows = batch([(1, 10), (1, 10), (2, 20)], **{layout.ROW: pa.array([0, 1, 0], pa.int32())})
    found = write(TextWriter("csv", "none"), rows)
    assert (found.messages, found.name.rows) == (2, 3)
    assert found.name.digest == ENCODER.encode(BLOCK, "age", [rows]).name.digest
