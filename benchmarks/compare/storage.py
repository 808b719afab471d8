"""Where runs store, and what is there afterwards."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
import s3fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem

from tests.support import s3, versity
from tests.support.drivers import options_for


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Contents of a target: objects, their bytes, their rows, and the different messages in these."""

    objects: int = 0
    bytes: int = 0
    rows: int = 0
    different: int = 0


def _parquet(file: Any, column: str) -> pa.Table:
    return pq.ParquetFile(file).read(columns=[column])


def _csv(file: Any, column: str) -> pa.Table:
    return pyarrow.csv.read_csv(file, convert_options=pyarrow.csv.ConvertOptions(include_columns=[column]))


READERS: dict[str, Callable[[Any, str], pa.Table]] = {"parquet": _parquet, "csv": _csv}
"""How to read one column of a file, by the kind of file."""


class Target:
    """An empty directory, or with options of s3fs a bucket, to which jetcapture stores through `driver`."""

    def __init__(self, place: str, options: dict[str, Any] | None = None, driver: str = "fsspec") -> None:
        self._place, self._options, self._driver = place, options, driver

    @property
    def directory(self) -> Path:
        """The directory, for programs without another store."""
        return Path(self._place)

    @property
    def settings(self) -> dict[str, Any]:
        """The section `store` of jetcapture's configuration."""
        return {"url": self._place, **({"options": options_for(self._driver, self._options)} if self._options else {})}

    def stored(self, files: str, identity: str) -> Stored:
        """Count it all, row by row; `identity` is the column that tells messages apart."""
        fs = s3fs.S3FileSystem(**self._options, use_listings_cache=False) if self._options else LocalFileSystem()
        root = self._place.removeprefix("s3://")
        sizes = {name: entry["size"] for name, entry in fs.find(root, detail=True).items()}
        sizes = {name: size for name, size in sizes.items() if not name.removeprefix(root).startswith(("/_", "/."))}
        if not sizes:
            return Stored()
        parts = []
        for name in sizes:
            with fs.open(name) as file:
                parts.append(READERS[files](file, identity).column(identity).combine_chunks())
        found = pa.concat_arrays(parts)
        return Stored(
            objects=len(sizes),
            bytes=sum(sizes.values()),
            rows=len(found),
            different=pc.count_distinct(found).as_py(),
        )


class Storage:
    """Gives out targets on a local disk or on S3; `s3` is versitygw where that is on the PATH, else moto.

    `s3-fsspec` and `s3-obstore` are the same with that driver.
    """

    def __init__(self, directory: Path, kinds: set[str]) -> None:
        self._directory = directory
        self._options: dict[str, Any] = {}
        self._stack = contextlib.ExitStack()
        if kinds <= {"local"}:
            return
        if shutil.which("versitygw"):
            endpoint = self._stack.enter_context(versity.Versity(directory / "versity")).endpoint
            self._options = versity.options(endpoint)
        else:
            endpoint = self._stack.enter_context(s3.serve())
            self._options = {**s3.CREDENTIALS, "client_kwargs": {"endpoint_url": endpoint, "region_name": "us-east-1"}}

    @contextlib.contextmanager
    def target(self, kind: str) -> Iterator[Target]:
        """A new target, gone afterwards."""
        if kind == "local":
            with tempfile.TemporaryDirectory(dir=self._directory, prefix="stored-") as directory:
                yield Target(directory)
            return
        bucket = f"bench-{uuid.uuid4().hex}"
        login = {"aws_access_key_id": self._options["key"], "aws_secret_access_key": self._options["secret"]}
        client = boto3.client("s3", **login, **self._options["client_kwargs"])
        client.create_bucket(Bucket=bucket)
        try:
            yield Target(f"s3://{bucket}/archive", self._options, kind.partition("-")[2] or "fsspec")
        finally:
            s3fs.S3FileSystem(**self._options).rm(bucket, recursive=True)
            client.close()

    def close(self) -> None:
        """End what was started."""
        self._stack.close()
