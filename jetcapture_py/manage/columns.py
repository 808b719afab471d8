"""The `columns` command: write the `decode.columns` that messages suggest, ready to paste."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime

import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.archive import inferred, layout
from jetcapture_py.archive.schema import ENVELOPE, REPLY
from jetcapture_py.capture.inferred import inferring, learn_archived
from jetcapture_py.capture.parts import preparer
from jetcapture_py.config.column_types import parse_declared
from jetcapture_py.config.decoding import FORMATS
from jetcapture_py.config.model import Config
from jetcapture_py.errors import ConfigError
from jetcapture_py.jetstream.read_session import ReadSession
from jetcapture_py.manage.cases import prepared_of
from jetcapture_py.manage.many import CommandResult
from jetcapture_py.manage.tap import TIMEOUT, newest
from jetcapture_py.reading.arrow import read_archive
from jetcapture_py.text import one_line, plural
from jetcapture_py.transform.batch import BatchTooWideError, Decoded, Decoder, MessageBatch, decode_checked
from jetcapture_py.transform.decode.json_inferred import InferringDecoder
from jetcapture_py.transform.prepare import Preparer

SAMPLE = 2_000
"""Newest messages of the stream to decode."""
_MAX_EXAMPLE = 60
_PLAIN = re.compile(r"(?!(?:true|false|yes|no|on|off|null|y|n)$)[a-z_][a-z0-9_]*", re.IGNORECASE)


@dataclass(slots=True)
class Sample:
    """Rows of decoded messages."""

    rows: int = 0
    present: Counter[str] = field(default_factory=Counter)
    """Rows with a value, by column, also if it does not fit."""
    rescued: Counter[str] = field(default_factory=Counter)
    """Rows with a value that does not fit, by column."""
    examples: dict[str, str] = field(default_factory=dict)
    """The first value that does not fit, by column."""
    failures: int = 0

    def add(self, rows: pa.RecordBatch, failures: int) -> None:
        self.failures += failures
        self.rows += rows.num_rows
        for name, column in zip(rows.schema.names, rows.columns, strict=True):
            if name == layout.RESCUED:
                for text in column.drop_null().to_pylist():
                    values = json.loads(text)
                    paths = {inferred.column_of(path): path for path in values}
                    self.rescued.update(paths.keys())
                    self.present.update(layout.field_name(column_) for column_ in paths if column_ in values)
                    for column_, path in paths.items():
                        value = one_line(json.dumps(values[path]), _MAX_EXAMPLE)
                        self.examples.setdefault(column_, value if path == column_ else f"{path} = {value}")
            else:
                self.present[name] += len(column) - column.null_count


def run(config: Config, start: datetime | None) -> CommandResult:
    """Decode the newest messages of the stream or, with `start`, those archived since then. Raises JetcaptureError."""
    name = "json" if config.decode.format == "raw" else config.decode.format
    if name not in FORMATS or not FORMATS[name].infers:
        raise ConfigError(f"decode.format: expected raw, json or msgpack, whose columns are inferred, got {name}")
    decode = config.decode.model_copy(update={"format": name, "columns": {}, "on_conflict": "rescue"})
    config = config.model_copy(update={"decode": decode, "key": ""})
    prepare = replace(preparer(config, None, None), keep_payload=True)
    decoder = inferring(prepare.decoder)
    assert decoder is not None  # noqa: S101  # the format infers
    learn_archived(decoder, config)
    sample = asyncio.run(_streamed(config, prepare)) if start is None else _archived(config, prepare, start)
    columns = list(_columns(decoder, sample))
    lines = ["decode:", f"  format: {name}", "  columns:" if columns else "  # no column"]
    lines += [f"    {_text(column)}: {_text(type_)}{f'  # {note}' if note else ''}" for column, type_, note in columns]
    if sample.failures:
        lines.append(f"# {plural(sample.failures, 'message')} could not be decoded: jetcapture tap shows why")
    records = [{"column": column, "type": type_, "note": note} for column, type_, note in columns]
    return CommandResult(summary=plural(len(columns), "column"), lines=lines, records=records)


async def _streamed(config: Config, prepare: Preparer) -> Sample:
    sample = Sample()
    async with ReadSession(config.nats, f"jetcapture columns {config.source.stream}", timeout=TIMEOUT) as session:
        parts = await newest(session, config, SAMPLE)
    for consumer, received in parts:
        for prepared in prepared_of(replace(prepare, consumer=consumer), received):
            own = [name for name in prepared.rows.schema.names if name == layout.RESCUED or name[:6] != "_nats_"]
            sample.add(prepared.rows.select(own), prepared.quarantine.num_rows)
    return sample


def _archived(config: Config, prepare: Preparer, start: datetime) -> Sample:
    sample = Sample()
    batches = read_archive(
        config.store.url,
        config.source.stream,
        start=start,
        columns=(*ENVELOPE.names, layout.ROW).__contains__,
        options=config.store.options,
    )
    if layout.PAYLOAD not in batches.schema.names:
        raise ConfigError("decode.keep_payload: is false, so the archive has nothing to decode; leave --from out")
    for batch in batches:
        if layout.ROW in batch.schema.names:  # only a message's first row has its payload
            batch = batch.filter(pc.equal(pc.fill_null(batch.column(layout.ROW), 0), 0))
        rows = batch.select([name for name in ENVELOPE.names if name in batch.schema.names])
        rows = rows.append_column(REPLY, pa.nulls(len(rows), pa.binary()))
        for decoded in _decoded(prepare.decoder, MessageBatch(stream=config.source.stream, rows=rows.cast(ENVELOPE))):
            sample.add(decoded.fields, len(decoded.failures))
    return sample


def _decoded(decoder: Decoder, batch: MessageBatch) -> Iterator[Decoded]:
    """Decode messages, in smaller batches where their columns would be too large."""
    try:
        yield decode_checked(decoder, batch)
    except BatchTooWideError:
        half = len(batch) // 2
        yield from _decoded(decoder, batch.slice(0, half))
        yield from _decoded(decoder, batch.slice(half, len(batch) - half))


def _columns(decoder: InferringDecoder, sample: Sample) -> Iterable[tuple[str, str, str]]:
    """Yield name, type and note of each column."""
    for name, kept in decoder.types.items():
        type_ = inferred.text(kept)
        try:
            parse_declared(type_)
        except ValueError:  # a name or a type that cannot be declared
            type_ = "json"
        yield name, type_, "; ".join(_notes(name, sample))


def _notes(name: str, sample: Sample) -> Iterator[str]:
    if misfits := sample.rescued[name]:
        verb = "does" if misfits == 1 else "do"
        yield f"{misfits:,} of {plural(sample.rows, 'row')} {verb} not fit, such as {sample.examples[name]}"
    if missing := sample.rows - sample.present[layout.field_name(name)]:
        yield f"null in {missing:,} of {plural(sample.rows, 'row')}"


def _text(text: str) -> str:
    """Return text as YAML."""
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)
