"""Decode Avro (specification 1.12) with a reader's schema: single datums and object container files.

Single-object encoding, or Confluent's wire format with a registry, names a datum's writer schema. Any other datum must
have been written with the reader's schema. A registry is a directory of `<id>.avsc` files, or a server with Confluent's
HTTP API.
"""

from __future__ import annotations

import http.client
import io
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jetcapture_py.retry import delays
from jetcapture_py.text import one_line
from jetcapture_py.transform.batch import BatchTooWideError, Decoded, Failure, MessageBatch
from jetcapture_py.transform.decode.avro_schema import (
    Header,
    changed,
    check_size,
    check_types,
    shape_of,
    with_strict_enum,
    without_logical,
)
from jetcapture_py.transform.decode.bounds import BYTES_AT_ONCE, MAX_ROWS, check_count, check_values, width
from jetcapture_py.transform.decode.common import REFUSALS, assemble, decode_each, decode_rows, json_texts, payloads_of
from jetcapture_py.transform.decode.shapes import columns_of
from jetcapture_py.transform.decode.unpack import of_messages

if TYPE_CHECKING:
    from jetcapture_py.config.decoding import Column, DecodeConfig

_TIMEOUT = 5.0
_PATIENCE = 20.0
"""Seconds to retry an unresponsive registry before messages go to the quarantine."""
_FORGET = 30.0
"""Seconds after which a missing schema is looked up again."""
_MAX_MISSING = 10_000
_LARGEST = 16 << 20
"""Maximum bytes of a registry's answer."""


class _SilentError(Exception):
    """The registry does not answer."""


class Registry:
    """Looks up schemas at an address or in a directory. Raises ValueError for a directory that does not exist."""

    def __init__(self, location: str) -> None:
        self._url = location.rstrip("/") if "://" in location else None
        self._directory = Path(location)
        self._missing: dict[int | bytes, tuple[float, str]] = {}
        self._marks: dict[bytes, Path] = {}
        self._scanned, self._scan_again = 0, 0.0
        self._silent_until = 0.0
        if self._url is None and not self._directory.is_dir():
            raise ValueError("registry: the directory does not exist")

    def with_id(self, number: int) -> Any:
        """Return the parsed JSON of the schema with this id. Raises ValueError if unavailable."""
        self._check_missing(number)
        try:
            return self._fetch(number) if self._url is not None else _read(self._directory / f"{number}.avsc")
        except _SilentError as error:
            self._silent_until = time.monotonic() + _FORGET
            raise ValueError(f"the registry does not answer: {one_line(str(error))}") from None
        except FileNotFoundError:
            raise self.missed(number, f"schema {number} is not in the registry") from None
        except (OSError, ValueError, http.client.HTTPException, RecursionError) as error:
            raise self.missed(number, f"schema {number} cannot be read: {one_line(error)}") from None

    def with_fingerprint(self, mark: bytes, fingerprint: Callable[[Any], bytes]) -> Any | None:
        """Return the directory's schema with this `fingerprint`; None without one. Raises ValueError."""
        if self._url is not None:
            return None
        self._check_missing(mark)
        if mark not in self._marks:
            self._scan(fingerprint)
        if (path := self._marks.get(mark)) is None:
            return None
        try:
            return _read(path)
        except (OSError, ValueError, RecursionError) as error:
            raise self.missed(mark, f"the schema in {path.name} cannot be read: {one_line(error)}") from None

    def _scan(self, fingerprint: Callable[[Any], bytes]) -> None:
        """Re-read the directory if it has changed, or after some time."""
        try:
            changed = self._directory.stat().st_mtime_ns
        except OSError:
            return
        if changed == self._scanned and time.monotonic() < self._scan_again:
            return
        for path in self._directory.glob("*.avsc"):
            try:
                self._marks[fingerprint(_read(path))] = path
            except (OSError, ValueError, RecursionError):
                continue  # messages with its id report the problem
        self._scanned, self._scan_again = changed, time.monotonic() + _FORGET

    def _check_missing(self, key: int | bytes) -> None:
        if self._silent_until > time.monotonic():
            raise ValueError("the registry does not answer")
        again, reason = self._missing.get(key, (0.0, ""))
        if again > time.monotonic():
            raise ValueError(reason)

    def missed(self, key: int | bytes, reason: str) -> ValueError:
        """Remember for `_FORGET` seconds that a schema is unavailable; return the error."""
        if len(self._missing) >= _MAX_MISSING:
            self._missing.clear()
        self._missing[key] = time.monotonic() + _FORGET, reason
        return ValueError(reason)

    def _fetch(self, number: int) -> Any:
        """Request a schema from the registry; retry for a while if it does not answer."""
        deadline, waits = time.monotonic() + _PATIENCE, delays(0.1, 2.0)
        while True:
            try:
                with urllib.request.urlopen(f"{self._url}/schemas/ids/{number}", timeout=_TIMEOUT) as answer:  # noqa: S310
                    entry = json.loads(answer.read(_LARGEST))
                if not isinstance(entry, dict) or entry.get("schemaType", "AVRO") != "AVRO" or entry.get("references"):
                    raise ValueError("it is not an Avro schema without references")
                return json.loads(entry["schema"])
            except urllib.error.HTTPError as error:
                error.close()
                if error.code == 404:
                    raise FileNotFoundError from None
                if error.code < 500:
                    raise
                reason: Exception = error
            except (OSError, http.client.HTTPException) as error:
                reason = error
            if time.monotonic() > deadline:
                raise _SilentError(str(reason)) from None
            time.sleep(next(waits))


def _read(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


try:
    import fastavro
    from fastavro.schema import fingerprint, to_parsing_canonical_form
except ImportError:
    fastavro = None  # type: ignore[assignment]

_SINGLE_OBJECT = b"\xc3\x01"
_CONFLUENT = b"\x00"
_MAX_SCHEMA = 1 << 20
"""Maximum bytes of a schema in a container."""
_MAX_SCHEMAS = 256
"""Maximum schemas of containers in the cache, including unusable ones."""
_MAX_SCHEMA_BYTES = 8 << 20
"""Maximum bytes of all schemas in the cache; parsed, they take about six times as much."""


@dataclass(frozen=True, slots=True)
class _Writer:
    """A writer's schema."""

    schema: Any
    reader: Any
    """The schema to resolve it to; None if they are the same."""

    def read(self, stream: io.BytesIO) -> Any:
        """Read one datum. Raises ValueError."""
        start = stream.tell()
        try:
            value: Any = fastavro.schemaless_reader(stream, self.schema, None)
            if self.reader is not None:  # with it, the library skips fields without checking whether they exist
                end = stream.tell()
                stream.seek(start)
                value = fastavro.schemaless_reader(stream, self.schema, self.reader)
                stream.seek(end)
        except (EOFError, IndexError):
            raise ValueError("not a datum of its schema: truncated, or an index out of range") from None
        except Exception as error:  # of many types, for damaged data
            raise ValueError(f"not a datum of its schema: {one_line(error)}") from None
        return value


class AvroDecoder:
    """Decodes datums, or object container files with `container`, to all columns of `schema`, or to `columns`.

    Raises ValueError with one line for an invalid declaration.
    """

    def __init__(
        self,
        schema: Any,
        columns: Mapping[str, Column],
        *,
        registry: Registry | None = None,
        container: bool = False,
        max_inflated: int = 64 << 20,
    ) -> None:
        named: dict[str, Any] = {}
        parsed = _parsed(schema, named)
        shape = shape_of(parsed, named)
        if shape.fields is None:
            raise ValueError("the schema is not a record with fields")
        self._columns = columns_of(shape, columns, json_texts)
        self._width = sum(width(column.type) for column in self._columns)
        self._reader = _parsed(changed(schema, without_logical), {})
        self._own = self._writer(schema)
        self._by_fingerprint = {_fingerprint(schema): self._own}
        self._by_id: dict[int, _Writer] = {}
        self._of_containers: dict[bytes, _Writer | str] = {}
        self._registry, self._container, self._max_inflated = registry, container, max_inflated

    def decode(self, batch: MessageBatch) -> Decoded:
        """Decode every message of `batch`."""
        payloads, failures = payloads_of(batch), dict[int, Failure]()
        if self._container:
            return self._containers(payloads, failures)
        hint = ": set decode.registry" if self._registry is None else None
        messages, rows = decode_rows(self._datum, payloads, failures, hint)
        return assemble([column.of(rows) for column in self._columns], messages, failures)

    def _containers(self, payloads: list[bytes], failures: dict[int, Failure]) -> Decoded:
        read = inflated = 0

        def rows_of(payload: bytes) -> list[Any]:
            nonlocal read, inflated
            writer, blocks = self._blocks(payload)
            read += sum(count for count, _ in blocks)
            inflated += sum(len(data) for _, data in blocks)
            if len(payloads) > 1 and (read > MAX_ROWS or inflated > BYTES_AT_ONCE):
                raise BatchTooWideError
            check_values(read * self._width, inflated)  # a reader's schema has defaults
            return _rows(writer, blocks)

        messages = [rows or () for rows in decode_each(rows_of, payloads, failures)]
        owners = np.repeat(np.arange(len(payloads), dtype=np.int32), list(map(len, messages)))
        rows = list(chain.from_iterable(messages))
        decoded = assemble([column.of(rows) for column in self._columns], range(len(rows)), {}, owners)
        return of_messages(decoded, owners, failures)

    def _datum(self, payload: bytes) -> Any:
        writer, start = self._framing(payload)
        stream = io.BytesIO(payload)
        stream.seek(start)
        value = writer.read(stream)
        if stream.tell() != len(payload):
            raise ValueError(f"{len(payload) - stream.tell()} bytes follow the datum")
        return value

    def _framing(self, payload: bytes) -> tuple[_Writer, int]:
        """Return the writer's schema and the offset of the datum. Raises ValueError."""
        if payload.startswith(_SINGLE_OBJECT) and len(payload) >= 10:
            mark = payload[2:10]
            if mark in self._by_fingerprint:
                return self._by_fingerprint[mark], 10
            if self._registry is not None and (schema := self._registry.with_fingerprint(mark, _fingerprint)):
                try:
                    return self._by_fingerprint.setdefault(mark, self._writer(schema)), 10
                except REFUSALS as error:
                    raise self._registry.missed(mark, f"its schema cannot be used: {one_line(str(error))}") from None
            raise ValueError(
                f"no schema with the fingerprint {mark.hex()}: decode.registry must be a directory that has it"
            )
        if self._registry is None:
            return self._own, 0
        if not payload.startswith(_CONFLUENT) or len(payload) < 5:
            raise ValueError("expected a zero and four bytes with the id of a schema")
        return self._with_id(int.from_bytes(payload[1:5], "big")), 5

    def _with_id(self, number: int) -> _Writer:
        if (writer := self._by_id.get(number)) is None:
            assert self._registry is not None  # noqa: S101  only called with one
            schema = self._registry.with_id(number)
            try:
                writer = self._by_id[number] = self._foreign(schema)
            except REFUSALS as error:
                raise self._registry.missed(number, f"schema {number} cannot be used: {one_line(str(error))}") from None
        return writer

    def _writer(self, schema: Any) -> _Writer:
        plain = _parsed(changed(schema, without_logical), {})
        return _Writer(changed(plain, with_strict_enum), None if plain == self._reader else self._reader)

    def _foreign(self, schema: Any) -> _Writer:
        """Parse a writer's schema from a message. Raises ValueError."""
        check_size(schema)
        return self._writer(schema)

    def _blocks(self, payload: bytes) -> tuple[_Writer, list[tuple[int, bytes]]]:
        """Return the schema of an object container file, and the number and data of each block's rows.

        Raises ValueError.
        """
        if not payload:
            raise ValueError("the payload is empty")
        header = Header(payload)
        writer = self._of_container(header.schema)
        blocks: list[tuple[int, bytes]] = []
        announced = 0
        for count, data in header.blocks(self._max_inflated):
            announced += count
            if announced > MAX_ROWS:
                break
            blocks.append((count, data))
        check_count(announced)
        return writer, blocks

    def _of_container(self, schema: bytes) -> _Writer:
        """Return the writer's schema in the header of a container. Raises ValueError."""
        if len(schema) > _MAX_SCHEMA:
            raise ValueError(f"the schema has more than {_MAX_SCHEMA} bytes")
        if (writer := self._of_containers.get(schema)) is None:
            try:
                writer = self._foreign(json.loads(schema))
            except REFUSALS as error:
                writer = one_line(str(error))
            if len(self._of_containers) >= _MAX_SCHEMAS or sum(map(len, self._of_containers)) > _MAX_SCHEMA_BYTES:
                self._of_containers.clear()
            self._of_containers[schema] = writer
        if isinstance(writer, str):
            raise ValueError(writer)
        return writer


def make(config: DecodeConfig) -> AvroDecoder:
    """Return the configured decoder. Raises ValueError with one line."""
    if fastavro is None:
        raise ValueError("avro needs fastavro: pip install 'jetcapture[avro]'")
    assert config.schema_file is not None  # noqa: S101  the configuration requires it
    try:
        schema = json.loads(Path(config.schema_file).read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"schema: {one_line(error)}") from None
    return AvroDecoder(
        schema,
        config.columns,
        registry=None if config.registry is None else Registry(config.registry),
        container=config.rows == "container",
        max_inflated=config.max_inflated,
    )


def _rows(writer: _Writer, blocks: list[tuple[int, bytes]]) -> list[Any]:
    """Read all rows in the blocks of a container. Raises ValueError."""
    rows: list[Any] = []
    for count, data in blocks:
        stream = io.BytesIO(data)
        rows.extend(writer.read(stream) for _ in range(count))
        if stream.tell() != len(data):
            raise ValueError("a block has more data than rows")
    return rows


def _parsed(schema: Any, named: dict[str, Any]) -> Any:
    """Return the schema with full names; add its named types to `named`. Raises ValueError."""
    try:
        parsed = fastavro.parse_schema(schema, named_schemas=named)
    except Exception as error:  # of several types
        raise ValueError(f"the schema is not valid: {one_line(error)}") from None
    check_types(parsed, named)
    return parsed


def _fingerprint(schema: Any) -> bytes:
    """Return the CRC-64-AVRO fingerprint of a schema, as in single-object encoding. Raises ValueError."""
    try:
        return bytes.fromhex(fingerprint(to_parsing_canonical_form(schema), "CRC-64-AVRO"))
    except Exception as error:  # of several types
        raise ValueError(f"the schema is not valid: {one_line(error)}") from None
