"""Sections for what leaves the process: where objects go, who learns of them, and how much may be held until then."""

from __future__ import annotations

from pydantic import Field

from jetcapture_py.config import values as types
from jetcapture_py.config.section import Section, human


class StoreConfig(Section):
    """Where objects are stored."""

    type: types.Reference | None = Field(
        default=None,
        description="A store of your own, called with `url` and `options`: `package.module:object`. Default: by `url`.",
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
    """Who learns of an object after it is stored and its messages are acknowledged."""

    subject: types.SubjectTemplate | None = Field(
        default=None,
        description="Subject that a message is published on for each object, as JSON; may contain `{stream}`.",
    )
    call: types.Reference | None = Field(
        default=None, description="Function of your own that is called for each object: `package.module:function`."
    )


class SpoolConfig(Section):
    """Room on local disk for open blocks. It is empty at every start."""

    path: types.FilePath = Field(description="Directory on a local disk; every process has one of its own in it.")
    size: types.Size = Field(
        description="Size of all files in it together; half of it is for rows, the rest for the objects made of them."
    )


class LimitsConfig(Section):
    """Limits of the process."""

    memory: types.Memory = human("1GiB", "Memory for messages that are not stored yet; at least 32MiB.")
    open_blocks: types.Count = Field(
        default=1_000, description="Blocks open at the same time; above this the largest are sealed."
    )
    spool: SpoolConfig | None = Field(
        default=None, description="Rows that exceed the memory are moved here, before blocks are sealed for it."
    )
