"""The sections `store`, `on_stored` and `limits`."""

from __future__ import annotations

from pydantic import Field

from jetcapture_py.config import values as types
from jetcapture_py.config.section import Section, human


class StoreConfig(Section):
    """Where objects are stored."""

    type: types.Reference | None = Field(
        default=None,
        description="Your own store, called with `url` and `options`: `package.module:object`. Default: by `url`.",
    )
    url: types.StoreUrl = Field(
        description="Absolute path, file:///, s3://, abfs://, az://, gs:// or memory://; may contain `{key}`. With "
        "`type`, any address."
    )
    options: types.Options = Field(
        default_factory=dict, repr=False, exclude=True, description="Passed to fsspec; never printed or logged."
    )
    concurrency: types.Count = Field(default=4, description="Objects stored at the same time.")
    retry_for: types.RetryFor = human(
        "forever", "How long a failing store is retried before the process exits with an error."
    )


class OnStoredConfig(Section):
    """Notifications of stored objects, sent after their messages are acknowledged."""

    subject: types.SubjectTemplate | None = Field(
        default=None,
        description="Subject to publish a JSON message to for each object; may contain `{stream}`.",
    )
    call: types.Reference | None = Field(
        default=None, description="Your own function, called for each object: `package.module:function`."
    )


class SpoolConfig(Section):
    """Space on local disk for open blocks."""

    path: types.FilePath = Field(description="Directory on a local disk; its files have no names.")
    size: types.Size = Field(
        description="Maximum size of all its files; half is for rows, the rest for the objects written from them."
    )


class LimitsConfig(Section):
    """Limits of the capture."""

    memory: types.Memory = human("1GiB", "Memory for messages that are not stored yet; at least 32MiB.")
    open_blocks: types.Count = Field(
        default=1_000, description="Blocks open at the same time; above this the largest are sealed."
    )
    spool: SpoolConfig | None = Field(
        default=None,
        description="Local disk to move rows to when they exceed the memory, before blocks are sealed early.",
    )
