"""The filter subjects of each range of messages, from the consumer's watermark."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from jetcapture_py.archive.arrays import Mask
from jetcapture_py.archive.watermark import END, ConsumerWatermark, Filters, Stretch, stretches
from jetcapture_py.capture.watermark import observed
from jetcapture_py.config.subjects import matches
from jetcapture_py.jetstream.consumer import ConsumerState, filters_of


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterHistory:
    """The filters of a stream's consumer over time."""

    parts: tuple[Stretch, ...]
    """From sequence 1 on."""
    unknown: int
    """Up to this sequence, filters are unknown and assumed to be the first known ones."""

    @classmethod
    def of(cls, mark: ConsumerWatermark | None, consumer: ConsumerState) -> FilterHistory:
        """Read the history from the watermark of the stream's incarnation (None without one) and the consumer."""
        now = Filters(after=consumer.delivered, subjects=tuple(sorted(filters_of(consumer.config))))
        entries = (now,) if mark is None or not mark.filters else observed(mark, consumer).filters
        return cls(parts=tuple(stretches(entries)), unknown=entries[0].after if entries[0].subjects else 0)

    @property
    def changed(self) -> bool:
        return any(part.doubtful or part.candidates != self.parts[0].candidates for part in self.parts)

    def lines(self) -> Iterator[str]:
        """Yield the selected subjects of each range."""
        for part in self.parts:
            names = " or ".join(", ".join(one) or "all subjects" for one in part.candidates)
            names += ", or skipped" if part.doubtful else ""
            yield f"{part.first} to {part.last}: {names}" if part.last < END else f"from {part.first}: {names}"


def selected(part: Stretch, subjects: pa.BinaryArray) -> Mask:
    """Return a mask of the messages that match filters of a stretch."""
    distinct = subjects.dictionary_encode()
    names = [name.decode(errors="surrogateescape") for name in distinct.dictionary.to_pylist()]
    table = np.array([any(matches(name, one) for one in part.candidates) for name in names], np.bool_)
    mask: Mask = table[distinct.indices.to_numpy()]
    return mask
