"""The `maintain` section: what `jetcapture maintain` does to the archive."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from jetcapture_py.config import values as types
from jetcapture_py.config.section import Section, setting, wrong


class CompactConfig(Section):
    """Merging of small and overlapping objects; `{}` for the defaults."""

    target: types.Size = setting("Approximate size of the objects that it makes.", default="256MiB")
    after: types.DurationFromZero = setting(
        "How long ago a time slice must have ended. With a watermark, it must also be complete.", default="10m"
    )
    grace: types.DurationFromZero = setting(
        "How long replaced objects stay, and so how long a read may take.", default="1h"
    )


class LatestConfig(Section):
    """A table of the newest row of each key; needs the extra `query` too."""

    name: types.TableName = Field(description="Namespace and name of the table, such as `nats.orders_now`.")
    by: tuple[str, ...] = Field(
        min_length=1,
        description="The columns that make a key, such as `[order_id]`: names, or SQL of DuckDB such as "
        "`coalesce(after.id, before.id)`.",
    )
    deleted: str | None = setting(
        "SQL of DuckDB, such as `op = 'd'`: a key whose newest row meets it is not in the table, but in one whose name "
        "ends in `_deleted`."
    )


class TableConfig(Section):
    """An Iceberg table of the archive's complete time slices; needs the extra `table`."""

    name: types.TableName = Field(description="Namespace and name of the table, such as `nats.orders`.")
    catalog: types.Options = Field(
        repr=False,
        exclude=True,
        description="Properties of the catalog, as PyIceberg's `load_catalog` takes them, such as `type: sql` and "
        "`uri: sqlite:////var/lib/jetcapture/catalog.db`; never printed or logged.",
    )
    quarantine: types.TableName | None = setting("Table of the messages that could not be decoded.")
    location: types.TableLocation | None = setting(
        "URL of a directory for the tables' metadata; default: `_table` in the archive."
    )
    latest: LatestConfig | None = setting("A second table, of the newest row of each key.")

    @model_validator(mode="after")
    def _two_tables(self) -> Self:
        if self.quarantine == self.name:
            raise wrong("quarantine", "must differ from name, the table of the messages")
        if self.latest is not None:
            if {self.latest.name, f"{self.latest.name}_deleted"} & {self.name, self.quarantine}:
                raise wrong("latest.name", "must differ from name and quarantine, the tables of all messages")
            if self.location is not None:
                raise wrong("latest", "not with location: its files are in the archive")
        return self


class MaintainConfig(Section):
    """What `jetcapture maintain` does; what is left out is not done."""

    compact: CompactConfig | None = setting("Merging of small and overlapping objects.")
    table: TableConfig | None = setting("An Iceberg table of the archive, for engines that know nothing of jetcapture.")
    keep: types.Duration | None = setting(
        "How long time slices are kept after their end; older ones are removed. Default: for ever."
    )
