"""Open the Iceberg table of an archive in its catalog, with one-line errors.

Only this package knows PyIceberg's errors, properties and private attributes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetcapture_py.archive.layout import FIELD_IDS, TIME, TIMESTAMP
from jetcapture_py.config.maintain import TableConfig
from jetcapture_py.config.model import Config, StoreConfig
from jetcapture_py.errors import ConfigError, ConflictError, JetcaptureError
from jetcapture_py.store.archive import ArchiveFiles
from jetcapture_py.store.credentials import with_secrets
from jetcapture_py.store.obstore import as_fsspec
from jetcapture_py.text import one_line

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.manifest import DataFile, ManifestFile
    from pyiceberg.table import Table

CATALOG = "jetcapture"
"""PyIceberg's name of the catalog, unless its settings have a `name`."""
DIRECTORY = "_table"
"""Directory of the archive with the metadata of its tables."""
CONTENT = "jetcapture.content"
"""Table property with its content: stream and part."""
AGAIN = "drop the table from its catalog, without purging it, and run `jetcapture maintain`, which makes it again"
_FILE_PROPERTIES = {
    "key": "s3.access-key-id",
    "secret": "s3.secret-access-key",
    "token": "s3.session-token",
    "endpoint_url": "s3.endpoint",
    "region_name": "s3.region",
    "anon": "s3.anonymous",
    "account_name": "adls.account-name",
    "account_key": "adls.account-key",
    "sas_token": "adls.sas-token",
    "connection_string": "adls.connection-string",
    "tenant_id": "adls.tenant-id",
    "client_id": "adls.client-id",
    "client_secret": "adls.client-secret",
}
"""PyIceberg's names of the store's options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveTable:
    """A table in the state in which it was loaded."""

    catalog: Catalog
    name: str
    """Namespace and name, separated by dots."""
    root: str
    """URL prefix of the archive's objects."""
    location: str
    """URL of the directory for a new table's metadata."""
    content: str
    """Its stream and part."""
    time: int
    """Field id of the time column whose day partitions the files."""
    loaded: Table | None
    """None for a table that does not exist yet."""

    @property
    def snapshot(self) -> int | None:
        """The id of the current snapshot; None without one."""
        current = self.loaded and self.loaded.current_snapshot()
        return current.snapshot_id if current else None

    def manifests(self) -> list[ManifestFile]:
        """Return the manifests of the current snapshot."""
        current = self.loaded and self.loaded.current_snapshot()
        return list(current.manifests(self.loaded.io)) if self.loaded and current else []

    def files(self) -> Iterator[tuple[int, DataFile]]:
        """Yield the current files with the numbers of their manifests."""
        for number, manifest in enumerate(self.manifests() if self.loaded else ()):
            if self.loaded:
                yield from ((number, entry.data_file) for entry in manifest.fetch_manifest_entry(self.loaded.io))


@contextmanager
def open_table(
    config: Config, archive: ArchiveFiles, *, quarantine: bool = False, read_only: bool = False
) -> Iterator[ArchiveTable]:
    """Load the table of a capture's messages or of its quarantine; with `read_only`, create no catalog database.

    Raises ConfigError, JetcaptureError, and ConflictError for a commit that was refused.
    """
    given = table_config(config)
    name = given.quarantine if quarantine else given.name
    if name is None:
        raise ConfigError("maintain.table.quarantine: not set")
    root = root_url(archive)
    location = (given.location or f"{root}{DIRECTORY}").rstrip("/")
    column = TIMESTAMP if quarantine or config.block.time == "timestamp" else TIME
    content = f"{'quarantine of ' if quarantine else ''}stream {config.source.stream}"
    with open_catalog(config, read_only=read_only) as catalog:
        from pyiceberg.exceptions import NoSuchTableError

        loaded = None
        with explained(f"cannot load table {name}"):
            try:
                loaded = catalog.load_table(name)
            except NoSuchTableError:
                pass
            except Exception as error:
                if not _has_no_tables(error):
                    raise
        if loaded is not None:
            refuse_other(loaded, name, content)
            _refuse_partitions(loaded, name)
        try:
            with explained(f"cannot keep table {name}"):
                yield ArchiveTable(
                    catalog=catalog,
                    name=name,
                    root=root,
                    location=f"{location}/{name}",
                    content=content,
                    time=loaded.spec().fields[0].source_id if loaded else FIELD_IDS[column],
                    loaded=loaded,
                )
        except ConflictError:
            raise
        except JetcaptureError as error:
            if "location" not in str(error).lower():
                raise
            allow = f"the catalog must allow {root} for the files and {location}/ for the metadata"
            raise JetcaptureError(f"{error}; {allow}") from error


def root_url(archive: ArchiveFiles) -> str:
    """Return the URL prefix of objects in the table's form."""
    return f"{archive.url.rstrip('/')}/"


def refuse_other(table: Table, name: str, content: str) -> None:
    """Raise JetcaptureError for a table with other content."""
    if (other := table.properties.get(CONTENT)) != content:
        whose = f"of {other}" if other else "not made by jetcapture"
        raise JetcaptureError(f"table {name} is {whose}: it is left as it is; use another name")


def _refuse_partitions(table: Table, name: str) -> None:
    from pyiceberg.transforms import DayTransform

    if [type(field.transform) for field in table.spec().fields] != [DayTransform]:
        fields = ", ".join(field.name for field in table.spec().fields) or "nothing"
        raise JetcaptureError(f"table {name} is partitioned by {fields}, and not by day: {AGAIN}")


def table_names(config: Config) -> dict[bool, str]:
    """Return the names of an archive's tables; the key is True for the quarantine's."""
    given = config.maintain.table if config.maintain else None
    names = {} if given is None else {False: given.name, True: given.quarantine}
    return {quarantine: name for quarantine, name in names.items() if name is not None}


def table_config(config: Config) -> TableConfig:
    """Return the section `maintain.table`. Raises ConfigError without one."""
    given = config.maintain.table if config.maintain else None
    if given is None:
        raise ConfigError("maintain.table: required for a table, but not set")
    return given


@contextmanager
def open_catalog(config: Config, *, read_only: bool) -> Iterator[Catalog]:
    """Connect to the catalog of `maintain.table`; with `read_only`, create no database for it.

    Raises ConfigError, JetcaptureError.
    """
    try:
        from pyiceberg.catalog import load_catalog
    except ImportError as error:
        raise ConfigError(
            f"maintain.table: PyIceberg is not installed ({error}): pip install 'jetcapture[table]'"
        ) from error
    settings = {**file_properties(config.store), **table_config(config).catalog}
    properties: dict[str, Any] = {name: _text(value) for name, value in settings.items()}
    if read_only:
        scheme, _, path = str(properties.get("uri")).partition("?")[0].partition(":///")
        missing = scheme.startswith("sqlite") and not Path(path).exists()
        properties |= {"uri": "sqlite://"} if missing else {"init_catalog_tables": "false"}
    with explained("cannot open the table's catalog"):
        catalog = load_catalog(properties.pop("name", CATALOG), **properties)
    try:
        yield catalog
    finally:
        with suppress(Exception):  # drivers raise their own errors
            catalog.close()


def _text(value: Any) -> Any:
    """Convert a property for PyIceberg: to text, or nested properties unchanged."""
    return value if isinstance(value, dict) else str(value).lower() if isinstance(value, bool) else str(value)


@contextmanager
def explained(problem: str) -> Iterator[None]:
    """Turn errors of a catalog or its store into one line: ConflictError if a commit was refused."""
    try:
        yield
    except JetcaptureError:
        raise
    except Exception as error:  # catalogs, drivers and file systems raise their own
        reason = one_line(getattr(error, "orig", None) or error)  # without SQL
        raise (ConflictError if is_refused(error) else JetcaptureError)(f"{problem}: {reason}") from error


def is_refused(error: Exception) -> bool:
    """Whether a commit lost against another process, which may have dropped the table."""
    from pyiceberg.exceptions import CommitFailedException, NoSuchTableError, TableAlreadyExistsError

    lost = (CommitFailedException, NoSuchTableError, TableAlreadyExistsError)
    return isinstance(error, lost) or "database is locked" in str(error)


def _has_no_tables(error: Exception) -> bool:
    """Whether a catalog's database lacks the catalog's own tables, as may happen if nothing is created."""
    return "iceberg_tables" in str(error) and any(text in str(error) for text in ("no such table", "not exist"))


def file_properties(store: StoreConfig) -> dict[str, str]:
    """Return PyIceberg's properties for the same store. Raises ConfigError for secret files."""
    options = with_secrets(store.options)
    nested = options.get("client_kwargs")
    every = as_fsspec({**options, **(nested if isinstance(nested, dict) else {})})
    return {
        _FILE_PROPERTIES[name]: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in every.items()
        if name in _FILE_PROPERTIES and value is not None
    }
