"""Keep the types of inferred columns in the archive, so that restarts and other replicas have the same ones."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from typing import Any

from jetcapture_py.archive.inferred import InferredColumns, KnownTypes, merged, path, text
from jetcapture_py.config.model import Config, SourceConfig
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.log import event
from jetcapture_py.store import NoteStore, change_note, configured_store, notes_of, read_inferred
from jetcapture_py.transform.batch import Decoder
from jetcapture_py.transform.decode.json_inferred import InferringDecoder

log = logging.getLogger("jetcapture.capture")

_NOTHING: KnownTypes = {}


def inferring(decoder: Decoder | None) -> InferringDecoder | None:
    """Return the decoder that infers columns, inside others or not; None without one, or if columns follow messages."""
    while decoder is not None and not isinstance(decoder, InferringDecoder):
        decoder = getattr(decoder, "decoder", None)
    return None if decoder is None or decoder.conflict == "widen" else decoder


def learn_archived(decoder: Decoder, config: Config) -> None:
    """Have the decoder keep the types of the configuration's archive, if it has any that can be read."""
    source = config.source
    if (inner := inferring(decoder)) is not None:
        with suppress(JetcaptureError):
            notes = notes_of(configured_store(config.store), config.store.url)
            inner.learn(read_inferred(notes, source.stream, source.consumer))


class InferredTypes:
    """The types of one capture, for threads of its store. Without `notes`, or inferred columns, nothing is kept."""

    def __init__(self, notes: NoteStore | None, source: SourceConfig, decoder: Decoder) -> None:
        self._notes, self._stream, self._consumer = notes, source.stream, source.consumer
        self._decoder = inferring(decoder)
        self._lock = threading.Lock()
        self._kept = self._learned = _NOTHING
        """The archive's types, and those of them that the decoder has."""
        self._written: KnownTypes = {}
        """The decoder's types when they were last written."""

    def read(self) -> None:
        """Have the decoder keep the archive's types; if they cannot be read, log it, and infer them again."""
        if self._decoder is None or self._notes is None:
            return
        try:
            self._kept = read_inferred(self._notes, self._stream, self._consumer)
        except JetcaptureError as error:
            event(log, logging.WARNING, "columns.failed", error=error)
            return
        self.learn()

    def learn(self) -> bool:
        """Between two batches: have the decoder keep the archive's types; return whether columns have changed.

        Log columns that have another type than in batches since the last write.
        """
        if self._decoder is None or (kept := self._kept) is self._learned:
            return False
        before, self._learned = self._decoder.types, kept
        changed = self._decoder.learn(kept)
        if before is not self._written:
            _log_changes(before, self._decoder.types)
        return changed

    def write(self) -> None:
        """Add new types to the archive, for `learn` with those of other replicas; log columns whose type has changed.

        Objects are stored only after that. Raises StoreError.
        """
        if self._decoder is not None and self._notes is not None:
            with self._lock:
                self._write(self._decoder, self._notes)

    def _write(self, decoder: InferringDecoder, notes: NoteStore) -> None:
        if decoder.types in (self._kept, self._written):
            return
        own = decoder.types
        types: dict[str, Any] = {}

        def change(data: bytes | None) -> bytes | None:
            types.clear()
            with suppress(JetcaptureError):  # a damaged file is replaced
                types.update({} if data is None else self._decoded(data))
            types.update(merged(dict(types), own))
            new = InferredColumns(stream=self._stream, consumer=self._consumer, types=types).encode()
            return None if new == data else new

        change_note(notes, path(self._stream, self._consumer), change)
        _log_changes(self._kept, {column: type_ for column, type_ in own.items() if type_ == types[column]})
        _log_changes(own, types)
        self._kept, self._written = types, own

    def _decoded(self, data: bytes) -> KnownTypes:
        return InferredColumns.decode(data, self._stream, path(self._stream, self._consumer)).types


def _log_changes(before: KnownTypes, after: KnownTypes) -> None:
    for column, type_ in after.items():
        if column in before and (was := text(before[column])) != text(type_):
            event(log, logging.INFO, "column.changed", column=column, was=was, type=text(type_))
