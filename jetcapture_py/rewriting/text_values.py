"""Parse values of NDJSON and CSV as their declared types, or fail: no type is inferred.

Every value is written as text again and compared, so that a type which is not the one it was stored with is noticed.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
import pyarrow as pa

from jetcapture_py.archive.block_writer import csv_fields, json_values
from jetcapture_py.archive.nested import flatten, offsets_of, struct_array
from jetcapture_py.rewriting.text_objects import pieces
from jetcapture_py.store.archive import ArchiveFiles, File
from jetcapture_py.verify.examine import text_rows

_NOT_READABLE = (pa.ArrowException, msgspec.MsgspecError, ValueError, TypeError, KeyError)
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST = msgspec.json.Decoder(list[msgspec.Raw])
_TEXT = msgspec.json.Decoder(str)
_UNKNOWN = "its lines do not have these columns with the types in decode.columns"


class TextError(Exception):
    """Values cannot be read with certainty; the text says why."""


def typed_rows(archive: ArchiveFiles, file: File, suffix: str, types: Mapping[str, pa.DataType]) -> Iterator[pa.Table]:
    """Yield the rows of an object in NDJSON or CSV, some at a time: columns of these types.

    Raises TextError, VanishedError, StoreError.
    """
    try:
        if suffix.startswith(".csv"):
            for rows in text_rows(archive, file, suffix, dict.fromkeys(types, pa.string())):
                texts = {name: rows[name].combine_chunks() for name in types}
                arrays = {name: _of_csv(texts[name], type_) for name, type_ in types.items()}
                _compare((csv_fields(arrays[name]), csv_fields(texts[name])) for name in types)
                yield pa.table(arrays)
            return
        rest = b""
        for piece in pieces(archive, file):
            *lines, rest = (rest + piece).split(b"\n")
            objects = [_OBJECT.decode(line) for line in lines]
            raw = {name: [bytes(each[name]) for each in objects] for name in types}
            arrays = {name: _of_json(raw[name], type_) for name, type_ in types.items()}
            _compare((json_values(arrays[name]), pa.array(raw[name], pa.binary()).cast("string")) for name in types)
            yield pa.table(arrays)
        if rest:
            raise TextError("its last line has no end")
    except _NOT_READABLE as error:
        raise TextError(_UNKNOWN) from error


def _compare(pairs: Iterable[tuple[pa.Array, pa.Array]]) -> None:
    if not all(one.equals(other) for one, other in pairs):
        raise TextError(_UNKNOWN)


def _of_csv(texts: pa.StringArray, type_: pa.DataType) -> pa.Array:
    """Return the values of fields of CSV."""
    if pa.types.is_nested(type_):
        return _of_json([None if text is None else text.encode() for text in texts.to_pylist()], type_)
    return _of_text(texts, type_)


def _of_json(raw: Sequence[bytes | msgspec.Raw | None], type_: pa.DataType) -> pa.Array:
    """Return the values of JSON texts."""
    types = pa.types
    texts = [None if each is None or bytes(each) == b"null" else bytes(each) for each in raw]
    if types.is_struct(type_):
        rows = [{} if text is None else _OBJECT.decode(text) for text in texts]
        children = [_of_json([row.get(field.name) for row in rows], field.type) for field in type_]
        return struct_array(children, type_, pa.array([text is None for text in texts], pa.bool_()))
    if types.is_map(type_):
        maps = [None if text is None else _OBJECT.decode(text) for text in texts]
        keys = [key for each in maps for key in each or ()]
        values = [value for each in maps for value in (each or {}).values()]
        return pa.MapArray.from_arrays(
            offsets_of(maps), _of_text(pa.array(keys, pa.string()), type_.key_type), _of_json(values, type_.item_type)
        ).cast(type_)
    if types.is_list(type_):
        lists = [None if text is None else _LIST.decode(text) for text in texts]
        return pa.ListArray.from_arrays(offsets_of(lists), _of_json(flatten(lists), type_.value_type), type=type_)
    if types.is_integer(type_) or types.is_floating(type_) or types.is_boolean(type_) or types.is_decimal(type_):
        plain = [None if text is None else text.decode() for text in texts]
    else:
        plain = [None if text is None else _TEXT.decode(text) for text in texts]
    return _of_text(pa.array(plain, pa.string()), type_)


def _of_text(texts: pa.StringArray, type_: pa.DataType) -> pa.Array:
    """Return the values of texts as they are without quotes."""
    if pa.types.is_binary(type_):
        return pa.array([None if text is None else b64decode(text) for text in texts.to_pylist()], type_)
    return texts.cast(type_)
