"""Tell a stream's messages from those of an earlier stream of its name."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jetcapture_py.config.units import microseconds_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Incarnation:
    """The stream's current incarnation: its creation time as sent by the server, and in microseconds since the epoch.

    A recreated stream counts from 1 again, so only messages of this incarnation can be compared with the stream. With
    `mirror`, messages may be older than the stream. A stream that was restored from a backup may be newer than its
    messages up to the sequence `restored`, of which the first is from `oldest`: they are those of the earlier stream.
    """

    created: str
    since: int
    mirror: bool
    restored: int = 0
    oldest: int = 0

    @classmethod
    def of(cls, created: str, *, mirror: bool, restored: int = 0, oldest: int = 0) -> Incarnation:
        """Parse a creation time. Raises ValueError."""
        since = microseconds_of(datetime.fromisoformat(created))
        return cls(created=created, since=since, mirror=mirror, restored=restored, oldest=oldest)

    def includes(self, seqs: Any, times: Any) -> Any:
        """Return a mask of the messages of this incarnation; times in microseconds, as int64 arrays."""
        mask = times >= self.since
        if self.restored:
            mask |= (times >= self.oldest) & (seqs <= self.restored)
        return mask

    def holds(self, created: str, low: int | None, high: int | None) -> bool | None:
        """Whether all (True) or none (False) of an object's messages are of it; None: some or unknown.

        `created` is from the object's footer, "" without one; compaction joins several with commas. `low` and `high`
        are the object's earliest and latest timestamp. They decide if the footer does not, as for objects of several
        incarnations that compaction has merged. The footer takes precedence: a server's clock may go backward.
        """
        if created == self.created:
            return True
        if self.mirror:
            return created == "" or self.created in created.split(",")
        if low is None or high is None or low < self.since <= high:
            return None
        if self.restored and self.oldest <= high < self.since:
            return None
        return low >= self.since
