"""Parse values of NDJSON and CSV as their declared types, or fail: no type is inferred.

Every value is written as text again and compared, to detect a type other than the stored one.
"""

from __future__ import annotations

import csv
import io
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping

import msgspec
import pyarrow as pa

from jetcapture_py.archive.block_writer import csv_fields, json_values
from jetcapture_py.rewriting.text_objects import pieces
from jetcapture_py.store.archive import ArchiveFiles, File
from jetcapture_py.verify.examine import text_rows

_NOT_READABLE = (pa.ArrowException, msgspec.MsgspecError, ValueError, TypeError, KeyError, csv.Error)
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_STRING = msgspec.json.Decoder(str)

NestedParser = Callable[[pa.StringArray, pa.DataType], pa.Array]
"""Returns the values of JSON texts of a nested type. Raises ArrowException."""


class TextError(Exception):
    """Values cannot be read with certainty."""

    def __init__(self) -> None:
        super().__init__("its lines do not have these columns with the types in decode.columns")


def column_names(archive: ArchiveFiles, file: File, suffix: str) -> list[str]:
    """Return the columns of an object in NDJSON or CSV. Raises TextError, VanishedError, StoreError."""
    text = b""
    for piece in pieces(archive, file):
        text += piece
        if b"\n" in piece:
            break
    try:
        if suffix.startswith(".csv"):
            return next(csv.reader(io.StringIO(text.decode(errors="replace"), newline="")), [])
        return list(_OBJECT.decode(text.partition(b"\n")[0]))
    except _NOT_READABLE as error:
        raise TextError from error


def typed_rows(
    archive: ArchiveFiles, file: File, suffix: str, types: Mapping[str, pa.DataType], nested: NestedParser
) -> Iterator[pa.Table]:
    """Yield columns of an object in NDJSON or CSV with these types. Raises TextError, VanishedError, StoreError."""
    is_csv = suffix.startswith(".csv")
    written = csv_fields if is_csv else json_values
    try:
        for texts in _csv(archive, file, suffix, types) if is_csv else _ndjson(archive, file, types):
            columns = {}
            for name, type_ in types.items():
                column = columns[name] = _parsed(texts[name] if is_csv else _plain(texts[name]), type_, nested)
                if not written(column).equals(csv_fields(texts[name]) if is_csv else texts[name]):
                    raise TextError
            yield pa.table(columns)
    except _NOT_READABLE as error:
        raise TextError from error


def _csv(
    archive: ArchiveFiles, file: File, suffix: str, names: Mapping[str, object]
) -> Iterator[dict[str, pa.StringArray]]:
    """Yield the fields of each column."""
    for rows in text_rows(archive, file, suffix, dict.fromkeys(names, pa.string())):
        yield {name: rows[name].combine_chunks() for name in names}


def _ndjson(archive: ArchiveFiles, file: File, names: Mapping[str, object]) -> Iterator[dict[str, pa.StringArray]]:
    """Yield the JSON texts of each column."""
    rest = b""
    for piece in pieces(archive, file):
        *lines, rest = (rest + piece).split(b"\n")
        objects = [_OBJECT.decode(line) for line in lines]
        yield {name: pa.array([bytes(row[name]).decode() for row in objects], pa.string()) for name in names}
    if rest:
        raise TextError


def _plain(texts: pa.StringArray) -> pa.StringArray:
    """Return JSON texts in the form of CSV fields: strings without quotes, and null as null."""
    values = texts.to_pylist()
    plain = [None if text == "null" else _STRING.decode(text) if text.startswith('"') else text for text in values]
    return pa.array(plain, pa.string())


def _parsed(texts: pa.StringArray, type_: pa.DataType, nested: NestedParser) -> pa.Array:
    if pa.types.is_nested(type_):
        return nested(texts, type_)
    if pa.types.is_binary(type_):
        return pa.array([None if text is None else b64decode(text) for text in texts.to_pylist()], type_)
    return texts.cast(type_)
