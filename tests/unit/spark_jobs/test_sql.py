"""Which columns a statement reads."""

from __future__ import annotations

from spark_jobs.sql import columns_in

COLUMNS = ["amount", "_nats_subject", "_nats_payload", "odd `name"]
STATEMENTS: tuple[tuple[str, list[str] | None], ...] = (
    ("SELECT key, sum(Amount) FROM archive GROUP BY key", ["amount"]),
    ("SELECT count(*), count( * ) FROM archive WHERE `odd ``name` = 1", ["odd `name"]),
    ("WITH a AS (SELECT amount FROM archive) SELECT max(amount) FROM a", ["amount"]),
    ("SELECT 1 FROM archive JOIN other USING (_nats_subject)", ["_nats_subject"]),
    ("SELECT * FROM archive", None),
    ("SELECT count(*), archive.* FROM archive", None),
    ("SELECT amount * 2 FROM archive", None),
    ("FROM archive |> SELECT amount", None),
    ("SELECT amount FROM ((FROM archive) UNION (FROM archive))", None),
    ("SELECT amount FROM archive NATURAL JOIN other", None),
    ("SELECT amount IN (TABLE amounts) FROM archive", None),
    ("SELECT identifier('am' || 'ount') FROM archive", None),
    ("DESCRIBE archive", None),
)
"""With the columns that they read; None where they may mean others."""


def test_a_statement_reads_the_columns_that_it_names_and_all_where_it_may_mean_others() -> None:
    for sql, columns in STATEMENTS:
        reads = columns_in(sql)
        assert columns == (None if reads is None else [name for name in COLUMNS if reads(name)]), sql
