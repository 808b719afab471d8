"""The driver of S3, Azure and others through fsspec. Requests time out."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from typing import Any

import pyarrow as pa

from jetcapture_py.errors import ConfigError
from jetcapture_py.store import ports
from jetcapture_py.store.ports import NEW, Entry, is_unknown_header
from jetcapture_py.text import one_line

KINDS = {"s3": "s3", "s3a": "s3", "abfs": "azure", "abfss": "azure", "az": "azure", "gs": "gcs"}
"""Kinds of store by scheme; S3 and Azure are also the extras' names."""
_MODIFIED = ("mtime", "LastModified", "last_modified", "updated", "created")
"""Keys of a listing entry that may have the modification time, in order of preference."""
_SINGLE_PUT = 3 << 30
"""s3fs sends objects of up to twice this size as one PUT, so a killed process leaves no unfinished upload."""
_NOTES = threading.Lock()
"""Serializes the writers of this process, for stores without conditional writes."""
_CHECKSUMS = "store.options.config_kwargs.request_checksum_calculation"


class FsspecDriver:
    """Any file system of fsspec with atomic writes. Uploads each object in one request. Raises ConfigError."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        import fsspec  # not needed for local stores
        from fsspec.asyn import AsyncFileSystem
        from fsspec.spec import AbstractFileSystem

        scheme = url.partition("://")[0]
        self.kind = KINDS.get(scheme, "")
        self.conditional = bool(self.kind)
        try:
            driver = fsspec.get_filesystem_class(scheme)
        except (ImportError, ValueError) as error:
            hint = f"install it with: pip install 'jetcapture[{self.kind}]'" if self.kind else str(error)
            raise ConfigError(f"store.url: {scheme}:// is not available here; {hint}") from error
        try:
            self._fs = self._open(scheme, {**driver._get_kwargs_from_urls(url), **options})
        except (TypeError, ValueError) as error:
            raise ConfigError(f"store.options: {scheme}:// does not accept them; {one_line(error)}") from error
        self.root = str(self._fs._strip_protocol(url)).rstrip("/")
        self.options: Mapping[str, Any] = dict(self._fs.storage_options)
        find = self._fs._find if isinstance(self._fs, AsyncFileSystem) else self._fs.find
        # whether it lists all levels at once; fsspec's walk of the directories hides errors
        self._flat = find.__func__ not in (AsyncFileSystem._find, AbstractFileSystem.find)

    def _open(self, scheme: str, given: Mapping[str, Any]) -> Any:
        import fsspec

        # aiohttp warns about blocking the event loop; this one is fsspec's, in its own thread
        warnings.filterwarnings("ignore", "Sending a large body directly", ResourceWarning)
        options: dict[str, Any] = {"skip_instance_cache": True, **given}
        timeouts = [ports.CONNECT_TIMEOUT, ports.READ_TIMEOUT]
        if self.kind == "azure":
            options = {"connection_timeout": timeouts[0], "read_timeout": timeouts[1], **options}
            timeouts = [options["connection_timeout"], options["read_timeout"]]
        elif self.kind == "s3":
            config: dict[str, Any] = {
                "connect_timeout": timeouts[0],
                "read_timeout": timeouts[1],
                "retries": {"mode": "standard", "total_max_attempts": ports.ATTEMPTS},
                **options.get("config_kwargs", {}),
            }
            options["config_kwargs"] = config
            timeouts = [config["connect_timeout"], config["read_timeout"]]
            self._checked = config.get(_CHECKSUMS.rpartition(".")[2]) != "when_required"
        self._patience = ports.ATTEMPTS * sum(timeouts)
        fs = fsspec.filesystem(scheme, **options)
        if self.kind == "s3":
            fs.retries = 1  # beyond botocore's own
        return fs

    def _limit(self, size: int = 0) -> dict[str, Any]:
        """Return the timeout argument for a request of `size` bytes."""
        return {"timeout": self._patience + size / ports.SLOWEST} if self._fs.async_impl else {}

    # ------------------------------------------------------------------ the port

    def list(self, directory: str, *, deep: bool = True) -> Iterator[Entry]:
        self._fs.invalidate_cache()
        if deep and self._flat:
            for path, info in self._listed("find", directory).items():
                if info.get("type") != "directory" and not path.endswith("/"):  # which marks a directory
                    yield _entry(path, info)
            return
        directories = [directory]
        while directories:
            for info in self._listed("ls", directories.pop()):
                if deep and info["type"] == "directory":
                    directories.append(str(info["name"]).rstrip("/"))
                else:
                    yield _entry(str(info["name"]).rstrip("/"), info)

    def _listed(self, method: str, directory: str) -> Any:
        try:
            return getattr(self._fs, method)(directory, detail=True)
        except FileNotFoundError:
            return {}

    def read(self, path: str, start: int = 0, end: int | None = None) -> bytes:
        span = {} if end is None else {"start": start, "end": end}
        return bytes(self._fs.cat_file(path, **span, **self._limit((end or start) - start)))

    def stat(self, path: str) -> Entry:
        self._fs.invalidate_cache()
        info = self._fs.info(path, refresh=True, **self._limit())
        if info["type"] != "file":
            raise FileNotFoundError(path)
        return _entry(path, info)

    def write(self, path: str, data: pa.Buffer, condition: str | None) -> None:
        options = self._limit(data.size)
        if condition == NEW:
            options["mode"] = "create"
        elif condition is not None:
            options |= {"IfMatch": condition} if self.kind == "s3" else _if_match(condition)
        if self.kind == "s3":
            options["chunksize"] = _SINGLE_PUT
        elif self.kind == "azure":
            options["retry_total"] = 0  # the caller retries, and logs why
            options["max_concurrency"] = 1  # parallel parts would continue after one has failed
        try:
            self._fs.pipe_file(path, data.to_pybytes(), **options)
        except Exception as error:
            if self.kind == "s3" and self._checked and is_unknown_header(error):
                error.add_note(f"if the server does not know checksums, set {_CHECKSUMS}: when_required")
            raise

    def remove(self, path: str, condition: str | None = None) -> None:
        if condition is None or not self.conditional:
            self._fs.rm_file(path, **self._limit())
            return
        container, name, _ = self._fs.split_path(path)
        if self.kind == "s3":
            self.s3("delete_object", Bucket=container, Key=name, IfMatch=condition)
            return
        from azure.core.exceptions import ResourceNotFoundError
        from fsspec.asyn import sync

        client = self._fs.service_client.get_blob_client(container, name)
        try:
            sync(self._fs.loop, client.delete_blob, **_if_match(condition), **self._limit())
        except ResourceNotFoundError as error:
            raise FileNotFoundError(path) from error

    def locked(self, name: str) -> AbstractContextManager[Any]:  # noqa: ARG002  one lock for all
        return nullcontext() if self.conditional else _NOTES

    # ------------------------------------------------------------------ more than the port

    def upload(self, source: str, path: str) -> None:
        """Write a local file of any size."""
        self._fs.put_file(source, path)

    def s3(self, method: str, **request: Any) -> Any:
        """Return S3's answer to a method of boto3's client."""
        return self._fs.call_s3(method, **request, **self._limit())

    def azure(self) -> tuple[Any, ...]:
        """Return the properties of the container and of the account, or the errors of asking for them."""
        from fsspec.asyn import sync

        async def of_container(client: Any) -> Any:
            async with client.get_container_client(self.root.partition("/")[0]) as container:
                return await container.get_container_properties()

        async def of_account(client: Any) -> Any:
            return await client.get_service_properties()

        answers = []
        for request in (of_container, of_account):
            try:
                answers.append(sync(self._fs.loop, request, self._fs.service_client, **self._limit()))
            except Exception as error:  # of Azure's library
                answers.append(error)
        return tuple(answers)


def _entry(path: str, info: Mapping[str, Any]) -> Entry:
    tag = info.get("ETag") or info.get("etag")
    return Entry(path, int(info["size"] or 0), _modified(info), tag, info.get("type") == "directory")


def _modified(info: Mapping[str, Any]) -> float | None:
    """Return the modification time in a listing entry, in seconds since the epoch; None without one."""
    for name in _MODIFIED:
        value = info.get(name)
        if isinstance(value, str):
            try:
                value = datetime.fromisoformat(value)
            except ValueError:  # not ISO 8601
                continue
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return None


def _if_match(tag: str) -> dict[str, Any]:
    from azure.core import MatchConditions

    return {"etag": tag, "match_condition": MatchConditions.IfNotModified}
