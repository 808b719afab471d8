"""Render a plan as SQL of DuckDB: views over its own Parquet reader, with each message once.

Objects of one schema are one `read_parquet`, with their partitions from the paths. DuckDB reads local objects itself,
through links with only these partitions in their paths. Remote objects are read through `ArchiveFiles`, with its
timeouts and renewed credentials.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from fsspec.spec import AbstractFileSystem

from jetcapture_py.archive import layout
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.archive.overlaps import Range
from jetcapture_py.errors import JetcaptureError, VanishedError
from jetcapture_py.reading.columns import INSTANT, Nulled, is_cast
from jetcapture_py.reading.convert import convert, forced
from jetcapture_py.reading.plan import Bound, ReadPlan, list_objects
from jetcapture_py.reading.selection import Latest
from jetcapture_py.store.archive import AGAIN, ArchiveFiles, File
from jetcapture_py.store.object_file import ObjectParts
from jetcapture_py.text import MAX_LOGGED, one_line

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

VIEWS = ("archive", "quarantine", "objects")
LATEST = "latest"
"""The view of the newest row of each key."""
_DATABASE = "memory"
"""DuckDB's name of a database in memory. Schemas are named with it: without, `temp` and `system` are ambiguous."""
_MEMORY_SHARE = 2
"""DuckDB gets this part of the memory; Python, Arrow and the page cache need the rest."""
_REMOTE_THREADS = 16
"""Threads that read a remote store; they mostly wait."""
_COPY, _FILE = "_nats_copy", "_nats_file"
_ROW_NUMBER = "file_row_number"
"""DuckDB's column of row numbers within a file."""
_ROW_BITS = 36
_OBJECTS = pa.schema(
    [
        ("key", pa.string()),
        ("bundle", pa.string()),
        ("quarantine", pa.bool_()),
        ("bucket", INSTANT),
        ("first_seq", pa.int64()),
        ("last_seq", pa.int64()),
        ("rows", pa.int64()),
        ("bytes", pa.int64()),
        ("path", pa.string()),
        ("modified", INSTANT),
    ]
)
_SIMPLE = {
    pa.null(): "INTEGER",  # as Parquet stores it
    pa.bool_(): "BOOLEAN",
    pa.int8(): "TINYINT",
    pa.int16(): "SMALLINT",
    pa.int32(): "INTEGER",
    pa.int64(): "BIGINT",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
    pa.string(): "VARCHAR",
    pa.binary(): "BLOB",
    pa.date32(): "DATE",
    pa.time64("us"): "TIME",
    pa.timestamp("us"): "TIMESTAMP",
    INSTANT: "TIMESTAMPTZ",
}


def named_views(statement: str, views: Iterable[str], schema: str = "") -> list[str]:
    """Return those of `views`, such as `archive` or `orders.archive`, that a statement may read.

    `schema` is the current one, which need not be named.
    """
    import duckdb

    names = {view for view in views if _pattern(view, schema).search(statement)}
    if names:
        # without tables of its own, as DuckDB names those that a view reads; some statements need these tables
        with duckdb.connect() as empty, suppress(duckdb.Error):
            tables = empty.get_table_names(statement, qualified=True)
            names = {view for view in names if any(_pattern(view, schema).search(table) for table in tables)}
    return sorted(names)


def _pattern(view: str, schema: str) -> re.Pattern[str]:
    """Return the pattern of a view's name in SQL, in any case, quoted or not."""
    stream, _, name = view.rpartition(".")
    optional = "?" if stream.lower() == schema.lower() else ""
    escaped = re.escape(sql_name(stream)[1:-1])
    prefix = rf"(\"?{escaped}\"?\s*\.\s*){optional}" if stream else ""
    return re.compile(rf"(?<!\w){prefix}\"?{name}(?!\w)", re.IGNORECASE)


def list_views(views: Iterable[str]) -> str:
    """Return the SELECT of these views, of which some may not exist yet, and of the user's own views and tables."""
    known = ", ".join(
        f"({_text(schema)}, {_text(name)})" for schema, _, name in (view.rpartition(".") for view in views)
    )
    own = " UNION ".join(
        f"SELECT schema_name, {kind}_name FROM duckdb_{kind}s() WHERE NOT internal AND NOT {kind}_name ^@ '_nats_'"
        for kind in ("view", "table")
    )
    return f"SELECT * FROM (VALUES {known}) AS views(schema, name) UNION {own} ORDER BY ALL"


def sql_type(type_: pa.DataType) -> str:
    """Return DuckDB's name of a table's type."""
    if (simple := _SIMPLE.get(type_)) is not None:
        return simple
    if pa.types.is_decimal(type_):
        return f"DECIMAL({type_.precision}, {type_.scale})"
    if pa.types.is_map(type_):
        return f"MAP({sql_type(type_.key_type)}, {sql_type(type_.item_type)})"
    if pa.types.is_struct(type_):
        return f"STRUCT({', '.join(f'{sql_name(field.name)} {sql_type(field.type)}' for field in type_)})"
    return f"{sql_type(type_.value_type)}[]"


def sql_name(name: str) -> str:
    """Quote a name for SQL."""
    return '"' + name.replace('"', '""') + '"'


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


@contextmanager
def archive_views(*, remote: bool) -> Iterator[tuple[DuckDBPyConnection, ArchiveViews]]:
    """Open a DuckDB for views of archives, which spills to `TMPDIR`; `remote`: some of the archives are.

    Raises JetcaptureError if DuckDB is not installed.
    """
    with tempfile.TemporaryDirectory(prefix="jetcapture-query-", ignore_cleanup_errors=True) as directory:
        links = Path(directory, "objects")
        links.mkdir()
        with closing(connect(Path(directory, "spilled"))) as connection:
            yield connection, ArchiveViews(connection, links, remote=remote)


def version() -> str:
    """Return the version of DuckDB. Raises JetcaptureError if it is not installed."""
    try:
        import duckdb
    except ImportError as error:
        raise JetcaptureError("duckdb is missing: pip install 'jetcapture[query]'") from error
    return str(duckdb.__version__)


def connect(spilled: Path | None) -> DuckDBPyConnection:
    """Open a DuckDB in memory that installs nothing and spills to a directory, if any.

    Raises JetcaptureError if DuckDB is not installed.
    """
    version()
    import duckdb

    connection = duckdb.connect(
        config={
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
            "memory_limit": f"{_memory() // _MEMORY_SHARE >> 20}MiB",
            "temp_directory": str(spilled or ""),
        }
    )
    for setting in ("TimeZone = 'UTC'", "python_enable_replacements = false", "enable_progress_bar = false"):
        connection.execute(f"SET {setting}")
    return connection


def _memory() -> int:
    """Return the memory of this machine or its container in bytes."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            sizes.append(int(Path(path).read_text()))
    return min(sizes)


class ArchiveViews:
    """Views of archives on a DuckDB connection; each renders a plan. `orders.archive` is a view in the schema `orders`.

    `directory` is an empty directory for links to local objects.
    """

    def __init__(self, connection: DuckDBPyConnection, directory: Path, *, remote: bool = False) -> None:
        """`remote`: some of the archives are."""
        self._connection = connection
        self.plans: dict[str, ReadPlan] = {}
        """The plans of the created views."""
        self.nulled: list[Nulled] = []
        """What did not convert to the types that were asked for."""
        self._functions: dict[tuple[pa.DataType, pa.DataType | pa.Field], str] = {}
        self._directory = directory
        self._tops: dict[tuple[ArchiveFiles, str], str] = {}
        """Short paths that stand for directories of objects."""
        self._remote = _Remote() if remote else None
        if self._remote is not None:
            connection.register_filesystem(self._remote)
            connection.execute(f"SET threads = {_REMOTE_THREADS}")

    def create(self, name: str, plan: ReadPlan) -> None:
        """Create or replace a view of the rows of a plan."""
        self.plans[name] = plan
        self._create(name, self._select(plan))

    def create_latest(self, name: str, plan: ReadPlan, latest: Latest) -> None:
        """Create or replace a view of the newest row of each key in a plan. Raises JetcaptureError."""
        self.check(plan, latest)
        self.plans[name] = plan
        self._create(name, self._latest(plan, latest))

    def _create(self, name: str, select: str) -> None:
        schema, _, view = name.rpartition(".")
        where = f"VIEW {_DATABASE}.{sql_name(schema)}.{view}" if schema else f"TEMP VIEW {view}"
        self._connection.execute(f"CREATE OR REPLACE {where} AS {select}")

    def create_schema(self, name: str) -> None:
        """Create the schema of a stream, unless it has the name of one of DuckDB's own."""
        import duckdb

        with suppress(duckdb.Error):
            self._connection.execute(f"CREATE SCHEMA IF NOT EXISTS {_DATABASE}.{sql_name(name)}")

    def create_objects(self, view: str, files: Iterable[File]) -> None:
        """Create or replace a view that lists these files."""
        rows = [
            {
                "key": name.key,
                "bundle": name.bundle or None,
                "quarantine": name.quarantine,
                "bucket": datetime.fromtimestamp(name.bucket, UTC),
                "first_seq": name.first_seq,
                "last_seq": name.last_seq,
                "rows": name.rows,
                "bytes": file.size,
                "path": file.path,
                "modified": None if file.modified is None else datetime.fromtimestamp(file.modified, UTC),
            }
            for file in files
            if (name := file.name) is not None
        ]
        self._connection.register(f"_nats_{view}", pa.Table.from_pylist(rows, _OBJECTS))
        self._create(view, f"FROM {sql_name(f'_nats_{view}')}")

    def _outdated(self) -> bool:
        """Whether an object that the views read was removed or rewritten. Raises StoreError."""
        for plan in self.plans.values():
            now = list_objects(plan.files, plan.directory, plan.selection)
            sizes = {name: file.size for name, file in now.items()}
            if any(sizes.get(name) != plan.objects[name].size for name in plan.names):
                return True
        return False

    def explained(self, error: Exception) -> JetcaptureError:
        """Return an error of a statement in one line; VanishedError if an object that it reads was removed."""
        if self._remote is not None:
            error, self._remote.failure = self._remote.failure or error, None
        if isinstance(error, VanishedError) or self._outdated():
            return VanishedError(f"maintenance removed objects while the statement ran: {AGAIN}")
        if isinstance(error, JetcaptureError):
            return error
        text = str(error).partition("\n\nLINE ")[0]
        if "TProtocolException" in text or "Failed to read file" in text:
            text = f"{text}; jetcapture verify --deep names damaged objects"
        for (_, top), path in self._tops.items():
            text = text.replace(f"{path}/", f"{top}/")
        return JetcaptureError(one_line(text, MAX_LOGGED))

    def _path(self, files: ArchiveFiles, file: File) -> str:
        """Return the path of an object for DuckDB: its partitions and name, below the short path of the directory.

        So the only `=` in it are those of the partitions, and it has no characters of patterns.
        """
        parts = file.place.split("/")
        levels = 3 if file.name is not None and file.name.quarantine else 4
        top, tail = "/".join(parts[:-levels]), "/".join(parts[-levels:])
        path = self._tops.get((files, top))
        if path is None:
            number = len(self._tops)
            path = f"{self._directory}/{number}" if files.local else f"{_Remote.protocol}://{number}"
            self._tops[files, top] = path
            if files.local:
                Path(path).symlink_to(top)
        if self._remote is not None and not files.local:
            self._remote.files_at[f"{path}/{tail}".removeprefix(f"{_Remote.protocol}://")] = files, file
        return f"{path}/{tail}"

    # ------------------------------------------------------------------ SQL

    def _select(self, plan: ReadPlan, *, number: bool = False) -> str:
        """Return the SELECT of a plan's rows; with `number`, also of each row's location as a number."""
        table = plan.table
        if (taken := table.columns.get(_ROW_NUMBER)) is not None and (number or plan.shared):
            raise JetcaptureError(
                f"column {taken.name} has a name that DuckDB needs to compare rows: use jetcapture spark query"
            )
        selects = self._scans(plan, plan.whole, number=number)
        for place, (name, ranges) in enumerate(plan.parts.items(), len(plan.whole)):
            selects += self._scans(plan, [name], where=_within(ranges), number=number, first=place)
        if plan.shared:
            selects.append(self._compared(plan, number=number))
        if not selects:
            nothing = [f"CAST(NULL AS {sql_type(field.type)}) AS {sql_name(field.name)}" for field in table.schema]
            return f"SELECT {', '.join(nothing + [f'0 AS {_COPY}'] * number)} LIMIT 0"
        bounds = [condition for bound in plan.bounds for condition in _bounded(bound)]
        where = f" WHERE {' AND '.join(bounds)}" if bounds else ""
        return f"SELECT {_columns(plan, number=number)} FROM ({' UNION ALL '.join(selects)}){where}"

    def _latest(self, plan: ReadPlan, latest: Latest) -> str:
        """Return the SELECT of a plan's newest rows. Only the newest one's location by key is kept in memory."""
        lives = latest.lives(plan.files, plan.directory)
        order = ", ".join(order_of(latest, lives, several_rows=plan.table.several_rows))
        by = ", ".join(f"({expression})" for expression in latest.by)
        newest = f"SELECT arg_max({_COPY}, ROW({order})) AS {_COPY} FROM _nats_rows GROUP BY {by}"
        where = f" WHERE ({latest.deleted}) IS NOT TRUE" if latest.deleted is not None else ""
        return (
            f"WITH _nats_rows AS NOT MATERIALIZED ({self._select(plan, number=True)}) "
            f"SELECT {_columns(plan)} FROM _nats_rows SEMI JOIN ({newest}) USING ({_COPY}){where}"
        )

    def check(self, plan: ReadPlan, latest: Latest) -> None:
        """Raise JetcaptureError, which names the argument, for an expression that cannot be evaluated."""
        import duckdb

        columns = (f"CAST(NULL AS {sql_type(field.type)}) AS {sql_name(field.name)}" for field in plan.table.schema)
        nothing = f"SELECT {', '.join(columns)} LIMIT 0"
        deleted = [] if latest.deleted is None else [latest.deleted]
        for argument, expressions in (("by", latest.by), ("order", [latest.order]), ("deleted", deleted)):
            for expression in expressions:
                try:
                    self._connection.execute(f"SELECT ({expression}) FROM ({nothing}) GROUP BY ALL")
                except duckdb.Error as error:
                    reason = one_line(str(error).partition("\n\nLINE ")[0])
                    raise JetcaptureError(f"{argument}: {expression}: {reason}") from error

    def _scans(
        self, plan: ReadPlan, names: Iterable[ObjectName], *, where: str = "", number: bool = False, first: int = 0
    ) -> list[str]:
        """Return a SELECT of the table's columns for each layout and schema of these objects; with `number`, also of
        the row's location as a number, `first` being the first object's."""
        table = plan.table
        alike: dict[tuple[int, bool], list[ObjectName]] = defaultdict(list)
        for name in names:
            alike[plan.schema_of[name], bool(name.bundle)].append(name)
        selects = []
        for (schema, bundled), members in alike.items():
            stored = table.stored(schema)
            columns = []
            for folded, column in table.columns.items():
                value = f"CAST(NULL AS {sql_type(column.type)})"
                if folded in stored:
                    source, type_ = stored[folded]
                    value = self._converted(sql_name(source), type_, column, given=folded in table.given)
                columns.append(f"{value} AS {sql_name(column.name)}")
            columns += [
                f"{name} AS {name}" for name in map(sql_name, table.partitions)
            ]  # its case may differ in objects
            paths = ", ".join(_text(self._path(plan.files, plan.objects[name])) for name in members)
            options = "hive_partitioning = true, hive_types_autocast = false"
            if number:  # by path: DuckDB's own numbers of files are those that a filter on the partitions leaves
                file = f"{first} + CAST(enum_code(CAST({_FILE} AS ENUM({paths}))) AS BIGINT)"
                columns.append(f"(({file}) << {_ROW_BITS}) + {_ROW_NUMBER} AS {_COPY}")
                options += f", filename = {_text(_FILE)}"
            scan = f"read_parquet([{paths}], {options})"
            keys = plan.selection.keys
            conditions = [*([where] if where else []), *([_has_key(keys)] if bundled and keys is not None else [])]
            condition = f" WHERE {' AND '.join(conditions)}" if conditions else ""
            selects.append(f"SELECT {', '.join(columns)} FROM {scan}{condition}")
            first += len(members)
        return selects

    def _compared(self, plan: ReadPlan, *, number: bool) -> str:
        """Return the SELECT of the objects whose rows are compared. Only their identities are kept in memory."""
        first = len(plan.whole) + len(plan.parts)
        union = " UNION ALL ".join(self._scans(plan, plan.shared, number=True, first=first))
        identity = [sql_name(name) for name in plan.identity]
        if plan.table.several_rows:
            identity.append(f"coalesce({sql_name(layout.ROW)}, 0)")
        copies = f"SELECT min({_COPY}) AS {_COPY} FROM ({union}) GROUP BY {', '.join(identity)}"
        return f"SELECT {_columns(plan, number=number)} FROM ({union}) SEMI JOIN ({copies}) USING ({_COPY})"

    def _converted(self, column: str, stored: pa.DataType, field: pa.Field, *, given: bool) -> str:
        """Return the expression that converts a stored column to a column of the table.

        If the column's type was `given`, what does not convert is null, and counted.
        """
        target = field.type
        if is_cast(stored, target):
            return f"CAST({column} AS {sql_type(target)})"  # nothing to do, except for types such as unsigned numbers
        to = field if given else target
        name = self._functions.get((stored, to))
        if name is None:
            name = self._functions[stored, to] = f"_nats_converted_{len(self._functions)}"

            def converted(values: Any) -> pa.Array:
                array = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
                if not given:
                    return convert(array, target)
                array, nulled = forced(array, target)
                if nulled:
                    self.nulled.append((field, nulled))
                return array

            create: Any = self._connection.create_function  # its stub accepts no list of text
            # with side effects, it is called once for a value, also where a condition needs it
            how = {"type": "arrow", "null_handling": "special", "side_effects": given}
            create(name, converted, [sql_type(stored)], sql_type(target), **how)
        return f"{name}(CAST({column} AS {sql_type(stored)}))"


def order_of(latest: Latest, lives: Iterable[int], *, several_rows: bool) -> list[str]:
    """Return the expressions by which rows are ordered, of a stream with these `Latest.lives`."""
    seq, time = layout.SEQ, layout.TIMESTAMP
    if latest.order == seq:
        begun = " + ".join(f"(epoch_us({time}) >= {created})::INT" for created in lives)
        terms = [*([begun] if begun else []), seq, time]
    else:  # null is DuckDB's greatest value within a row
        terms = [f"({latest.order}) IS NOT NULL", f"({latest.order})", time, seq]
    return [*terms, *([f"coalesce({layout.ROW}, 0)"] if several_rows else [])]


def _columns(plan: ReadPlan, *, number: bool = False) -> str:
    return ", ".join([*map(sql_name, plan.table.schema.names), *[_COPY] * number])


def _within(ranges: Iterable[Range]) -> str:
    return f"({' OR '.join(f'{sql_name(layout.SEQ)} BETWEEN {first} AND {last}' for first, last in ranges)})"


def _has_key(keys: Iterable[str | None]) -> str:
    known = ", ".join(_text(key) for key in keys if key is not None)
    conditions = [f"{layout.KEY} IN ({known})"] if known else []
    return f"({' OR '.join([*conditions, *([f'{layout.KEY} IS NULL'] if None in keys else [])])})"


def _bounded(bound: Bound) -> Iterator[str]:
    value = (
        f"coalesce({', '.join(map(sql_name, bound.columns))})" if len(bound.columns) > 1 else sql_name(bound.columns[0])
    )
    for operator, time in ((">=", bound.start), ("<", bound.end)):
        if time is not None:
            yield f"{value} {operator} TIMESTAMPTZ {_text(time.astimezone(UTC).isoformat())}"


# ---------------------------------------------------------------------- files


class _Remote(AbstractFileSystem):  # type: ignore[misc]
    """Presents remote objects as files to DuckDB, read through `ArchiveFiles`."""

    protocol = "jetcapture"
    cachable = False
    failure: Exception | None = None
    """The last error of a request: DuckDB keeps only its text."""

    def __init__(self) -> None:
        super().__init__()
        self.files_at: dict[str, tuple[ArchiveFiles, File]] = {}
        """The archives and objects by their paths."""

    def glob(self, path: str, **_: Any) -> list[str]:
        return [path]

    def exists(self, path: str, **_: Any) -> bool:
        return self._strip_protocol(path) in self.files_at

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Return the object's entry in the listing."""
        return {"name": path, "type": "file", "size": self.size(path)}

    def size(self, path: str) -> int:
        """Return the object's size in bytes."""
        return self.files_at[self._strip_protocol(path)][1].size

    def modified(self, path: str) -> datetime:
        """Return the object's modification time, or 1970 if the store does not tell."""
        return datetime.fromtimestamp(self.files_at[self._strip_protocol(path)][1].modified or 0, UTC)

    def open(self, path: str, *_: Any, **__: Any) -> ObjectParts:
        """Open an object; each read is one request."""
        files, file = self.files_at[self._strip_protocol(path)]

        def read(start: int, end: int) -> bytes:
            try:
                return files.read(file, start, end)
            except JetcaptureError as error:
                self.failure = error
                raise

        return ObjectParts(file.size, read)
