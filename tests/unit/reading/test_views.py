"""Which views a statement of `jetcapture query` may read."""

from __future__ import annotations

from jetcapture_py.reading.duckdb import VIEWS, named_views

SEVERAL = [f"{stream}.{view}" for stream in ("ORDERS", "pay-ments", 'q"x') for view in VIEWS]


def test_only_the_views_that_a_statement_names_are_read() -> None:
    for sql, names in (
        ("SELECT * FROM Archive, (FROM objects)", ["archive", "objects"]),
        ("SELECT 'archive' AS quarantine", []),
        ("WITH archive AS (SELECT 1) FROM archive", []),
        ("PIVOT (FROM archive) ON key", ["archive"]),
    ):
        assert named_views(sql, VIEWS) == names, sql
    for sql, schema, names in (
        (
            'FROM orders.archive JOIN "pay-ments" . "Objects" USING (key)',
            "main",
            ["ORDERS.archive", "pay-ments.objects"],
        ),
        ('FROM "q""x".quarantine', "main", ['q"x.quarantine']),
        ("FROM memory.orders.archive", "main", ["ORDERS.archive"]),
        ("FROM reorders.archive, archive, orders.archives", "main", []),
        ("FROM archive", "orders", ["ORDERS.archive"]),
        ("SELECT 'orders.archive'", "main", []),
    ):
        assert named_views(sql, SEVERAL, schema) == names, sql
