"""Open the Iceberg table of an archive in its catalog, and say in one line what fails.

Everything that knows PyIceberg's errors, properties and private attributes is in this package.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
"""The name that PyIceberg knows the catalog by, unless its settings have a `name`."""
DIRECTORY = "_table"
"""Directory of the archive with the metadata of its tables."""
CONTENT = "jetcapture.content"
"""Property of a table: what it is of."""
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
    """A table as it was when it was loaded."""

    catalog: Catalog
    name: str
    """Namespace and name, separated by dots."""
    root: str
    """URL before the paths of the archive's objects."""
    location: str
    """URL of the directory for a new table's metadata."""
    content: str
    """What it is of."""
    time: int
    """Field id of the column whose day divides its files."""
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
        """Yield the current files, each with the number of its manifest."""
        for number, manifest in enumerate(self.manifests() if self.loaded else ()):
            if self.loaded:
                yield from ((number, entry.data_file) for entry in manifest.fetch_manifest_entry(self.loaded.io))


@contextmanager
def open_table(
    config: Config, archive: ArchiveFiles, *, quarantine: bool = False, read_only: bool = False
) -> Iterator[ArchiveTable]:
    """Load the table of a capture's messages or of its quarantine; with `read_only`, no catalog's database is made.

    Raises ConfigError, JetcaptureError, and ConflictError for a commit that was refused.
    """
    given = table_config(config)
    try:
        from pyiceberg.exceptions import NoSuchTableError
    except ImportError as error:
        raise ConfigError(
            f"maintain.table: PyIceberg is not installed ({error}): pip install 'jetcapture[table]'"
        ) from error
    name = given.quarantine if quarantine else given.name
    if name is None:
        raise ConfigError("maintain.table.quarantine: not set")
    root = root_url(archive)
    location = (given.location or f"{root}{DIRECTORY}").rstrip("/")
    column = TIMESTAMP if quarantine or config.block.time == "timestamp" else TIME
    content = f"{'quarantine of ' if quarantine else ''}stream {config.source.stream}"
    with _open_catalog({**file_properties(config.store), **given.catalog}, read_only=read_only) as catalog:
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
            _refuse_other(loaded, name, content)
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
    """Return the URL before the paths of objects, as the table has it."""
    return f"{archive.url.rstrip('/')}/"


def _refuse_other(table: Table, name: str, content: str) -> None:
    """Raise JetcaptureError for a table of something else, or with other partitions than ours."""
    from pyiceberg.transforms import DayTransform

    if (other := table.properties.get(CONTENT)) != content:
        whose = f"of {other}" if other else "not made by jetcapture"
        raise JetcaptureError(f"table {name} is {whose}: it is left as it is; use another name")
    if [type(field.transform) for field in table.spec().fields] != [DayTransform]:
        fields = ", ".join(field.name for field in table.spec().fields) or "nothing"
        raise JetcaptureError(f"table {name} is partitioned by {fields}, and not by day: {AGAIN}")


def table_names(config: Config) -> dict[bool, str]:
    """Return the names of an archive's tables; the key says whether it is that of the quarantine."""
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
def _open_catalog(settings: Mapping[str, Any], *, read_only: bool) -> Iterator[Catalog]:
    """Connect to a catalog with the properties of `pyiceberg.catalog.load_catalog`. Raises JetcaptureError."""
    from pyiceberg.catalog import load_catalog

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
        with suppress(Exception):  # drivers raise their own errors, and nothing is lost
            catalog.close()


def _text(value: Any) -> Any:
    """Return a property as PyIceberg expects it: as text, or properties inside it as they are."""
    return value if isinstance(value, dict) else str(value).lower() if isinstance(value, bool) else str(value)


@contextmanager
def explained(problem: str) -> Iterator[None]:
    """Turn what a catalog or its store raises into one line: ConflictError if a commit was refused."""
    try:
        yield
    except JetcaptureError:
        raise
    except Exception as error:  # catalogs, drivers and file systems raise their own
        reason = one_line(getattr(error, "orig", None) or error)  # without SQL
        raise (ConflictError if is_refused(error) else JetcaptureError)(f"{problem}: {reason}") from error


def is_refused(error: Exception) -> bool:
    """Whether another process was faster, or is at it."""
    from pyiceberg.exceptions import CommitFailedException, TableAlreadyExistsError

    return isinstance(error, CommitFailedException | TableAlreadyExistsError) or "database is locked" in str(error)


def _has_no_tables(error: Exception) -> bool:
    """Whether the database of a catalog has none of the catalog's own tables yet, as it may be if nothing is made."""
    return "iceberg_tables" in str(error) and any(text in str(error) for text in ("no such table", "not exist"))


def file_properties(store: StoreConfig) -> dict[str, str]:
    """Return the properties with which PyIceberg opens the same store. Raises ConfigError for secret files."""
    options = with_secrets(store.options)
    nested = options.get("client_kwargs")
    every = as_fsspec({**options, **(nested if isinstance(nested, dict) else {})})
    return {
        _FILE_PROPERTIES[name]: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in every.items()
        if name in _FILE_PROPERTIES and value is not None
    }
