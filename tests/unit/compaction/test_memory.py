"""The memory that compaction and erasure count."""

from __future__ import annotations

from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.compaction.memory import MemoryBudget, rewriting, searching
from jetcapture_py.compaction.plan import Source


def test_what_a_remote_store_sends_and_gets_is_counted() -> None:
    for suffix in [".parquet", ".ndjson.zst"]:
        size = 200 << 20
        name = ObjectName(
            stream="S", key="a", bucket=0, first_seq=1, last_seq=9, rows=9, digest="0" * 16, suffix=suffix
        )
        source = Source(name, size)
        near, far = rewriting(source, local=True), rewriting(source, local=False)
        assert near >= 2 * size
        assert far >= near + size, "a copy for the request"
        downloaded = searching(source, local=False) - searching(source, local=True)
        assert downloaded == (64 << 20 if suffix == ".parquet" else size)


def test_work_that_needs_more_than_there_is_gets_all_of_it() -> None:
    budget = MemoryBudget(100)
    with budget.taken(1000):
        assert budget._free == 0
    assert budget._free == budget.size == 50
