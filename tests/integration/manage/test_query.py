"""`jetcapture query`: SQL over an archive with DuckDB."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from jetcapture_py import cli
from jetcapture_py.archive import watermark
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.manage import query as command
from jetcapture_py.options import ChosenArchive
from jetcapture_py.reading.duckdb import ArchiveViews
from jetcapture_py.reading.plan import ReadPlan
from jetcapture_py.reading.selection import Selection
from jetcapture_py.store.archive import ArchiveFiles
from tests.support import s3
from tests.support.archives import HOUR, Archive
from tests.support.commands import jetcapture
from tests.support.running import settings

SUMS = "SELECT key, sum(amount) AS total FROM archive GROUP BY key ORDER BY key NULLS FIRST"
SEQS = "SELECT string_agg(_nats_seq, ',' ORDER BY _nats_seq) AS seqs FROM archive"
FOREVER = "SELECT count(*) FROM range(1000000000) a, range(1000) b WHERE a.range * b.range % 7 = 3"


@pytest.fixture
def archive(archive: Path) -> Archive:
    return Archive(archive)


@pytest.fixture
def orders(archive: Archive) -> Archive:
    archive.write([1, 2], "eu", amount=[1.5, 2.5])
    archive.write([3], "us", amount=[10.0])
    archive.write([4], None, bucket=HOUR + 3600, amount=[100.0])
    archive.write([5], quarantine=True, stage=["decode"], error=["truncated"])
    return archive


def query(archive: Archive | str, *words: str, code: int = 0) -> str:
    """Run the command; what it prints, or its error with another exit code."""
    done = jetcapture("query", *([archive.url, "ORDERS"] if isinstance(archive, Archive) else [archive]), *words)
    assert done.returncode == code, done.stderr
    return done.stderr if code else done.stdout


def told(archive: Archive | str, *words: str) -> list[str]:
    """The lines that the command prints as CSV, without the names."""
    return query(archive, *words, "--format", "csv").splitlines()[1:]


def session_of(archive: Archive, form: str = "csv") -> Any:
    """A session that writes in this format."""
    others = {"complete_only": False, "dedupe": "auto", "parquet_only": False, "form": form, "output": None}
    chosen = ChosenArchive(url=archive.url, stream="ORDERS", options={})
    return command._session(command.QueryRequest(archives=[chosen], selection=Selection(), **others))


def test_a_table_is_the_default(orders: Archive) -> None:
    assert query(orders, SUMS).splitlines() == ["key   total", "----  -----", "NULL  100.0", "eu    4.0", "us    10.0"]


def test_csv_and_json_write_values_as_spark_does(orders: Archive) -> None:
    values = (
        "'a,\"b\n' AS text, NULL AS nothing, [1, 2] AS list, '\\x00\\xff'::BLOB AS bytes, 1e10 AS number, "
        "TIMESTAMPTZ '2026-05-01 12:00:00.5Z' AS at, {'a': DATE '2026-05-01'} AS s, MAP {1.5: true} AS m, "
        "INTERVAL '-1 month -2 days -00:00:01' AS i"
    )
    names, row = csv.reader(io.StringIO(query(orders, f"SELECT {values}", "--format", "csv")))
    assert names == ["text", "nothing", "list", "bytes", "number", "at", "s", "m", "i"]
    assert row == [
        *('a,"b\n', "", "[1,2]", "AP8=", "10000000000.0"),
        *("2026-05-01 12:00:00.5", '{"a":"2026-05-01"}', '{"1.5":true}', "-1 month -2 days -00:00:01"),
    ]
    assert list(json.loads(query(orders, f"SELECT {values}", "--format", "json")).values())[:-1] == [
        *('a,"b\n', None, [1, 2], "AP8=", 1e10),
        *("2026-05-01T12:00:00.500000Z", {"a": "2026-05-01"}, {"1.5": True}),
    ]
    assert "two columns are called n" in query(orders, "SELECT 1 AS n, 2 AS n", "--format", "json", code=1)


def test_a_file_appears_only_when_the_statement_succeeded(orders: Archive, tmp_path: Path) -> None:
    good, bad, sums = (str(tmp_path / name) for name in ("good.csv", "bad.csv", "sums.parquet"))
    query(orders, SUMS, "--format", "csv", "--output", good)
    assert Path(good).read_text() == "key,total\n,100.0\neu,4.0\nus,10.0\n"
    query(orders, "SELECT error('no') FROM archive", "--format", "csv", "--output", bad, code=1)
    query(orders, SUMS, "--format", "parquet", "--output", sums)
    assert pq.read_table(sums).column("total").to_pylist() == [100.0, 4.0, 10.0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive", "good.csv", "sums.parquet"]
    query(orders, "SELECT range AS n FROM range(200000)", "--format", "parquet", "--output", sums)
    assert (pq.read_metadata(sums).num_rows, pq.read_metadata(sums).num_row_groups) == (200_000, 2)
    query(orders, SUMS, "--format", "parquet", code=2)
    query(orders, SUMS, "--format", "csv", "--output", "s3://bucket/sums.csv", code=2)


def test_a_link_and_a_pipe_stay_what_they_are(orders: Archive, tmp_path: Path) -> None:
    link, pipe, read = tmp_path / "link.csv", tmp_path / "pipe", list[bytes]()
    link.symlink_to("target.csv")
    (tmp_path / "target.csv").write_text("old")
    query(orders, SUMS, "--format", "csv", "--output", str(link))
    assert link.is_symlink()
    assert (tmp_path / "target.csv").read_text() == "key,total\n,100.0\neu,4.0\nus,10.0\n"
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    query(orders, SUMS, "--format", "parquet", "--output", str(pipe))
    reader.join()
    assert pq.read_table(io.BytesIO(read[0])).column("total").to_pylist() == [100.0, 4.0, 10.0]
    assert {path.name for path in tmp_path.iterdir()} == {"archive", "link.csv", "target.csv", "pipe"}


def test_whoever_reads_the_output_may_stop(
    orders: Archive, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        monkeypatch.setattr(sys, "argv", ["jetcapture", "query", orders.url, "ORDERS", SUMS])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert not ended.value.code
    assert capfd.readouterr().err == ""


def test_the_selection_narrows_the_views(orders: Archive) -> None:
    for arguments, seqs in (
        (["--from", "2026-05-01T13:00"], ["4"]),
        (["--key", "us", "--key", ""], ['"3,4"']),
        (["--key", "too long" * 50], ['""']),
    ):
        assert told(orders, SEQS, *arguments) == seqs
    assert told(orders, "SELECT stage, error, hour FROM quarantine") == ["decode,truncated,12"]
    rows = told(orders, "SELECT key, quarantine, bucket, first_seq, rows FROM objects")
    assert rows == [
        ",false,2026-05-01 13:00:00,4,1",
        "eu,false,2026-05-01 12:00:00,1,2",
        "us,false,2026-05-01 12:00:00,3,1",
        ",true,2026-05-01 12:00:00,5,1",
    ]


def test_only_the_views_that_a_statement_reads_are_needed(orders: Archive) -> None:
    (path,) = orders.root.glob("_quarantine/**/*.parquet")
    path.write_bytes(b"")
    assert told(orders, "SELECT count(*) FROM objects WHERE NOT quarantine AND path NOT LIKE 'archive'") == ["3"]
    assert told(orders, "CREATE VIEW mine AS FROM archive; PIVOT (SELECT key FROM mine) ON key") == ["2,1"]


def test_complete_only_ends_with_the_watermark(orders: Archive) -> None:
    refused = query(orders, SEQS, "--complete-only", code=1)
    assert "has no watermark for stream ORDERS, which --complete-only needs" in refused
    time_of_2 = datetime.fromtimestamp(HOUR + 2e-6, UTC)
    known = watermark.ConsumerWatermark(stream="ORDERS", consumer="archive", created="", seq=2, time=time_of_2)
    path = orders.root / watermark.path("ORDERS", "archive")
    path.parent.mkdir(parents=True)
    path.write_bytes(known.encode())
    assert told(orders, SEQS, "--complete-only") == ['"1,2"']


def test_columns_that_cannot_be_read_are_left_out_with_a_notice(archive: Archive) -> None:
    nameless = pa.array([{"": 1}], pa.struct([("", pa.int64())]))
    columns = {"Key": [1], "nameless": nameless, "nanos": pa.array([1], pa.timestamp("ns")), "good": [7]}
    archive.write([1], columns={**columns, "a": [1], "A": [2]})
    archive.write([2], nanos=["text"], a=[3])
    sql = "SELECT * EXCLUDE (_nats_headers) FROM archive ORDER BY _nats_seq"
    done = jetcapture("query", archive.url, "ORDERS", sql, "--format", "json")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [{name: row[name] for name in row if not name.startswith("_nats")} for row in rows] == [
        {"good": good, "key": "a", "date": "2026-05-01", "hour": "12"} for good in (7, None)
    ]
    assert done.stderr.splitlines() == [
        "column nameless has a field without a name: left out of archive",
        "column nanos is timestamp[ns], which cannot be read: left out of archive",
        "columns a and A differ in case only: left out of archive",
    ]


def test_filters_reach_the_objects_and_their_row_groups(orders: Archive) -> None:
    sql = "EXPLAIN ANALYZE SELECT count(amount) FROM archive WHERE key = 'eu' AND _nats_seq > 1"
    plan = query(orders, sql)
    assert "Scanning Files: 1/3" in plan
    assert "_nats_seq > 1" in plan


def replace_object(orders: Archive, *seqs: int) -> None:
    """Replace the object of key `us` by one with these messages."""
    (path,) = orders.root.glob("ORDERS/key=us/**/*.parquet")
    path.unlink()
    orders.write(list(seqs), "us", amount=[1.0] * len(seqs))


def test_objects_that_are_replaced_while_a_statement_starts_are_no_error(
    orders: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, seqs = ArchiveViews.create, [[3, 6]]

    def replaced(self: ArchiveViews, name: str, plan: ReadPlan) -> None:
        create(self, name, plan)
        if seqs:
            replace_object(orders, *seqs.pop())

    monkeypatch.setattr(ArchiveViews, "create", replaced)
    assert told(orders, SEQS) == ['"1,2,3,4,6"']
    seqs += [[seq] for seq in range(10, 30)]
    assert query(orders, SEQS, code=1) == (
        "jetcapture: maintenance removed objects while the statement ran: read it again; "
        "maintain.compact.grace is how long a read may take\n"
    )


def test_the_rows_of_the_last_statement_are_written_also_after_one_that_failed(orders: Archive, capsys: Any) -> None:
    with session_of(orders, "json") as session:
        session.run("CREATE TABLE t AS SELECT 2 AS b; SELECT 1 AS a FROM range(5000); SELECT 3 AS c FROM t")
        for wrong, reason in (("error('broken') AS a", "broken"), ("1 AS a, 2 AS a", "two columns are called a")):
            with pytest.raises(JetcaptureError, match=reason):
                session.run(f"SELECT {wrong} FROM range(5000)")
        session.run("FROM t")
    assert capsys.readouterr().out == '{"c":3}\n{"b":2}\n'


def test_a_view_of_the_users_own_follows_objects_that_are_replaced(orders: Archive, capsys: Any) -> None:
    with session_of(orders) as session:
        session.run("CREATE VIEW mine AS SELECT _nats_seq FROM archive")
        replace_object(orders, 3, 6)
        session.run("SELECT sum(_nats_seq) AS total FROM mine")
    assert capsys.readouterr().out.endswith("total\n16\n")


WRONG = [
    (["SELECT nope FROM archive"], 1, 'Binder Error: Referenced column "nope" not found in FROM clause! Candidate'),
    (["SELEC 1"], 1, 'Parser Error: syntax error at or near "SELEC"'),
    (["SELECT * FROM archives"], 1, "Catalog Error: Table with name archives does not exist!"),
    (["-- nothing"], 1, "SQL is missing"),
    (["SELECT 1", "--option", "x"], 2, "--option: NAME=VALUE is expected"),
    (["SELECT 1", "--from", "noon"], 2, "--from: "),
    (["SELECT 1", "--frmat", "csv"], 2, "unexpected argument --frmat: expected URL STREAM [SQL]"),
]
JOIN = (
    'SELECT o._nats_seq, p.paid, (SELECT count(*) FROM "pay-ments".objects) AS objects '
    'FROM orders.archive o JOIN "pay-ments".archive p ON o.amount = p.amount'
)


def test_a_column_has_the_type_that_was_asked_for_and_other_values_are_counted(orders: Archive) -> None:
    orders.write([6, 7, 8], "us", amount=["7.5", "n/a", "?"])
    orders.write([6, 7], "us", amount=["7.5", "n/a"])  # copies
    orders.write([1], stream="PAYMENTS", amount=["1.5"])

    def asked(sql: str, *words: str, stream: str | None = "ORDERS") -> tuple[str, str]:
        done = jetcapture("query", str(orders.root), *([stream] if stream else []), sql, *words, "--format", "csv")
        return done.stdout.partition("\n")[2].strip(), done.stderr

    counted = "values that do not convert are null: amount (2 not double)\n"
    assert asked("SELECT sum(amount) FROM archive", "--type", "amount=DOUBLE") == ("121.5", counted)
    null = "SELECT count(amount), count(*) FROM archive WHERE amount IS NULL AND key = 'us'"
    assert asked(null, "--type", "amount=DOUBLE") == ("0,2", counted)
    assert asked("SELECT count(*) FROM archive, quarantine", "--type", "amount=DOUBLE") == ("7", "")
    joined = "SELECT count(*) FROM orders.archive JOIN payments.archive USING (amount)"
    types = ("--type", "orders.amount=double", "--type", "PAYMENTS.amount=double")
    assert asked(joined, *types, stream=None) == ("1", counted)
    for words, code, problem in (
        (["ORDERS", SUMS, "--type", "nope=BIGINT"], 2, "the archive has no column nope; it has "),
        (["ORDERS", SUMS, "--type", "amount=NUMBER"], 2, "type of column amount: unknown type 'NUMBER'"),
        (["ORDERS", SUMS, "--type", "amount"], 2, "--type: expected COLUMN=TYPE"),
        ([joined, "--type", "amount=BIGINT"], 2, "--type: expected STREAM.COLUMN=TYPE with the name of a stream, got"),
    ):
        (line,) = query(str(orders.root), *words, code=code).splitlines()
        assert problem in line


@pytest.fixture
def several(orders: Archive) -> Archive:
    """An archive of the streams ORDERS, pay-ments and Damaged; of the last only the quarantine can be listed."""
    orders.write([1], stream="pay-ments", amount=[10.0], paid=["yes"])
    orders.write([1], stream="Damaged", quarantine=True)
    (path,) = orders.root.glob("_quarantine/Damaged/**/*.parquet")
    path.write_bytes(b"")
    (orders.root / "config.yaml").write_text(yaml.safe_dump(settings("nats://127.0.0.1:1", orders.url)))
    return orders


def test_latest_is_a_view_of_the_newest_row_of_each_key(several: Archive) -> None:
    path, sql = str(several.root), "SELECT key, _nats_seq FROM latest ORDER BY ALL"
    assert told(several, sql, "--by", "key") == ["eu,2", "us,3", ",4"]
    assert told(several, sql, "--by", "1 = 1", "--order", "-amount", "--deleted", "amount > 2") == ["eu,1"]
    assert told(path, sql.replace("latest", "orders.latest"), "--by", "key", "--key", "us") == ["us,3"]
    assert "Table with name latest does not exist: it needs --by" in query(several, sql, code=1)
    assert "Name its stream" in query(path, sql, "--by", "key", code=1)
    assert "by: place: Binder Error" in query(several, sql, "--by", "place", code=1)
    assert "--order needs --by" in query(several, sql, "--order", "amount", code=2)


def test_each_stream_of_a_directory_is_a_schema_and_only_named_ones_are_planned(several: Archive) -> None:
    path = str(several.root)
    assert told(path, JOIN) == ["3,yes,1"]
    assert told(path, f"USE orders; {SEQS}", "--from", "2026-05-01T13:00") == ["4"]
    assert told(path, SEQS.replace("archive", "orders.archive"), "--stream", "ORDERS") == ['"1,2,3,4"']
    for show in ("SHOW TABLES", "show all tables;"):
        rows = told(path, f"CREATE TABLE t (a INT); CREATE VIEW v AS FROM orders.objects; {show}")
        assert rows == [
            *(f"{name},{view}" for name in ("Damaged", "ORDERS") for view in ("archive", "objects", "quarantine")),
            *("main,t", "main,v"),
            *(f"pay-ments,{view}" for view in ("archive", "objects", "quarantine")),
        ]
    for sql, error in (
        (SEQS, 'Table with name archive does not exist! Name its stream, as in "Damaged".archive; SHOW TABLES lists'),
        ("FROM damaged.quarantine", "cannot read "),
        (
            SEQS.replace("archive", "orders.archive") + " --",
            "has no watermark for stream ORDERS, which --complete-only",
        ),
    ):
        assert error in query(path, sql, *(["--complete-only"] if "--" in sql else []), code=1)


def test_configurations_and_archives_are_queried_together(several: Archive, tmp_path: Path) -> None:
    one, many, other = (tmp_path / name for name in ("one.yaml", "many.yaml", "other"))
    one.write_text(yaml.safe_dump(settings("nats://127.0.0.1:1", several.url, source={"stream": "ORDERS"})))
    source = {"streams": ["pay-*", "none-*"], "consumer": "archive"}
    many.write_text(yaml.safe_dump(settings("nats://127.0.0.1:1", several.url) | {"source": source}))
    Archive(other).write([1], stream="REFUNDS", amount=[10.0])
    joined = f"{JOIN} JOIN refunds.archive r ON r.amount = o.amount"
    assert told(str(one), str(many), str(one), str(other), joined) == ["3,yes,1"]
    assert [row.partition(",")[0] for row in told(str(many), "SHOW TABLES")] == ["pay-ments"] * 3
    Archive(other).write([1], stream="orders")
    (tmp_path / "empty").mkdir()
    for words, problem in (
        ([one, other, "SELECT 1"], f"stream ORDERS in {several.url} and stream orders in {other} are the same schema"),
        ([tmp_path / "empty", "SELECT 1"], f"no archive of a stream in {tmp_path / 'empty'}"),
        (
            [other, "SELECT 1", "more"],
            "unexpected argument more: expected CONFIG… [SQL], DIRECTORY [SQL] or URL STREAM",
        ),
        ([other, "--frmat", "csv"], "unexpected argument --frmat: "),
        ([one, "none.yaml", "SELECT 1"], "none.yaml: cannot be read: No such file or directory"),
    ):
        (line,) = query(*map(str, words), code=2).splitlines()
        assert line.removeprefix("jetcapture: ").startswith(problem)


def test_a_terminal_gets_40_rows_and_the_columns_that_fit(
    orders: Archive, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = ", ".join(f"'value' AS column_{number}" for number in range(20))
    sql = f"SELECT range AS n, {columns} FROM range(100)"
    monkeypatch.setenv("COLUMNS", "100")

    def lines(*words: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["jetcapture", "query", orders.url, "ORDERS", *words])
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        with pytest.raises(SystemExit):
            cli.main()
        return capsys.readouterr().out.splitlines()

    shown = lines(sql)
    assert sum("value" in line for line in shown) == 40
    assert max(map(len, shown)) <= 100
    assert "100 rows (40 shown)" in shown[-1].replace("  ", " ")
    assert "21 columns" in shown[-1]
    assert r"\u009b" in "".join(lines("SELECT chr(155)"))
    assert len(lines(sql, "--all")) == 102
    assert not any("explain_key" in line for line in lines("EXPLAIN SELECT amount + 1 FROM archive"))


def test_errors_are_one_line(orders: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*words: str, code: int = 1) -> str:
        (line,) = query(*words, code=code).splitlines()
        return line.removeprefix("jetcapture: ")

    for words, code, message in WRONG:
        assert message in refused(orders.url, "ORDERS", *words, code=code)
    damaged = next(orders.root.glob("ORDERS/key=us/**/*.parquet"))
    data = damaged.read_bytes()
    damaged.write_bytes(data[:4] + bytes(60) + data[64:])
    line = refused(orders.url, "ORDERS", "SELECT max(_nats_stream) FROM archive")
    assert line.endswith("; jetcapture verify --deep names damaged objects")
    no_archive = f"no archive of stream NOPE under file://{orders.root}; there are: ORDERS"
    for view in ("archive", "objects"):
        assert refused(orders.url, "NOPE", f"SELECT count(*) FROM {view}") == no_archive
    assert '"": expected the name of a stream' in refused(orders.url, "", "SELECT count(*) FROM objects")
    monkeypatch.setitem(sys.modules, "duckdb", None)
    assert refused(orders.url, "ORDERS", "SELECT 1") == "duckdb is missing: pip install 'jetcapture[query]'"


def test_the_configuration_says_where_the_archive_is_and_standard_input_what_to_run(
    orders: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings("nats://127.0.0.1:1", orders.url)))
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"SET threads = 1;\n-- sums\n{SUMS};\n"))
    assert query(str(path), "--format", "csv", "--key", "us") == "key,total\nus,10.0\n"
    assert query(str(path), f"-- a comment\n{SUMS}", "--format", "csv", "--key", "us") == "key,total\nus,10.0\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert query(str(path), code=1) == "jetcapture: SQL is missing: give a statement, or write it to standard input\n"
    query(str(tmp_path / "none.yaml"), SUMS, code=2)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_running_statement_which_leaves_no_temporary_file(
    orders: Archive, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    (tmp_path / "tmp").mkdir()
    sql = f"SELECT _nats_seq FROM archive UNION ALL {FOREVER}"
    words = [sys.executable, "-m", "jetcapture_py", "query", orders.url, "ORDERS", sql]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            while not list((tmp_path / "tmp").glob("jetcapture-query-*/objects/*")):
                assert process.poll() is None
                time.sleep(0.05)
            process.send_signal(number)
            _, error = process.communicate(timeout=60)
            assert (process.returncode, error) == (code, b"jetcapture: interrupted\n")
        finally:
            process.kill()
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_signal_while_the_watermark_is_read_ends_the_command(
    orders: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "complete_end", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    assert query(orders, SEQS, "--complete-only", code=143) == "jetcapture: interrupted\n"


def test_without_sql_there_is_a_shell(
    orders: Archive, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed: list[str | BaseException] = ["SELECT nope", KeyboardInterrupt(), "SELECT key,"]
    typed += ["sum(amount) AS total FROM archive GROUP BY key ORDER BY key;", "SELECT nope;", "SELECT 1 AS one;", ""]
    typed += [EOFError()]

    def read(prompt: str) -> str:
        line = typed.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)
    with session_of(orders, "table") as session:
        command._shell(session)
    out, error = capsys.readouterr()
    assert "us    10.0" in out
    assert "one\n---\n1\n" in out
    interrupted, wrong = error.splitlines()
    assert interrupted == "interrupted"
    assert wrong.startswith("Binder Error")


def test_s3_is_read_and_written_without_extensions(
    archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objects of which a column is a small part, in two schemas, with copies."""
    for first, amounts in ((1, [1, 2, 3]), (3, [3, 4, 5])):
        payloads = [os.urandom(1_500_000) for _ in amounts]
        archive.write(range(first, first + 3), "eu", payloads=payloads, amount=amounts)
    archive.write([6], "us", payloads=[os.urandom(1_000_000)], amount=[6.5])
    with s3.serve() as endpoint:
        url, options = s3.upload(endpoint, archive.root), s3.arguments(endpoint)
        read, sizes = ArchiveFiles.read, []

        def counted(self: ArchiveFiles, *arguments: Any) -> bytes:
            data = read(self, *arguments)
            sizes.append(len(data))
            return data

        monkeypatch.setattr(ArchiveFiles, "read", counted)
        assert told(url, "ORDERS", "SELECT sum(amount), count(*) FROM archive", *options) == ["21.5,6"]
        assert sum(sizes) < sum(path.stat().st_size for path in archive.root.rglob("*.parquet")) / 5
        assert told(url, "ORDERS", "SELECT sum(octet_length(_nats_payload)) FROM archive", *options) == ["8500000"]
        output = f"{url}/sums.parquet"
        query(url, "ORDERS", SUMS, "--format", "parquet", "--output", output, *options)
        assert told(url, "ORDERS", "SELECT count(*) FROM objects", *options) == ["3"]
        assert "nats/sums.parquet" in s3.names(endpoint, url)
        assert f"no archive of stream NOPE under {url}" in query(url, "NOPE", SUMS, *options, code=1)
        other = Archive(tmp_path / "other")
        other.write([3], "us", stream="PAYMENTS")
        joined = "SELECT o.amount FROM orders.archive o JOIN payments.archive USING (_nats_seq)"
        assert told(url, other.url, joined, *options) == ["3.0"]
