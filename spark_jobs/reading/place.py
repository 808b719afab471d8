"""Translate a `store.url` and its options to Hadoop's URL, packages and settings.

The settings go to each reader and writer (`Place.settings`) and never into the session's configuration, so secrets in
them do not appear on command lines, in event logs or in Spark's UI.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fsspec
import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem
from pyspark.errors import PySparkException
from pyspark.find_spark_home import _find_spark_home
from pyspark.sql import SparkSession
from pyspark.sql.utils import is_remote

from jetcapture_py.archive import layout
from jetcapture_py.errors import JetcaptureError, VanishedError
from jetcapture_py.store.local_files import files_below
from jetcapture_py.store.remote import EXTRAS, with_secrets
from jetcapture_py.text import one_line

_SCHEMES = {"s3": "s3a", "az": "abfss", "abfs": "abfss", "gcs": "gs"}
_MODULES = {"s3a": "hadoop-aws", "abfss": "hadoop-azure", "gs": "hadoop-gcp"}
_NO_FILE_SYSTEM = re.compile(r"No FileSystem for scheme|ClassNotFoundException: Class \S*FileSystem not found")
_EMULATOR = {
    "fs.azure.always.use.https": "false",
    "fs.azure.account.hns.enabled": "false",
    "fs.azure.fns.account.service.type": "BLOB",
    "fs.azure.networking.library": "JDK_HTTP_URL_CONNECTION",
}
_MODIFIED = ("mtime", "LastModified", "last_modified", "updated", "created")
"""Keys of an fsspec listing entry that may have the modification time, in order of preference."""
SHARE = "every worker of Spark needs the archive at this path"
_AWS_DEFAULT = "software.amazon.awssdk.auth.credentials.DefaultCredentialsProvider"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A directory or a prefix in a bucket: `root` in the fsspec file system `fs`, `spark_root` in Spark."""

    fs: Any = field(repr=False)
    root: str
    url: str = field(repr=False)
    """The URL for other processes, such as Spark's workers: a local path is absolute. May contain secrets."""
    shown: str
    """The URL without secrets."""
    spark_root: str
    settings: Mapping[str, str] = field(repr=False)
    """Options for Spark's readers and writers. May contain secrets."""

    @classmethod
    def open(cls, url: str, options: Mapping[str, Any]) -> Place:
        """Open `url` with `store.options`. Raises JetcaptureError."""
        scheme = url.partition("://")[0]
        shown = re.sub(r"//[^/@]*:[^/@]*@", "//", url)
        if "{key}" in url:
            raise JetcaptureError(f"{shown} is a separate archive per key: replace {{key}} with one key")
        try:
            fs, path = fsspec.url_to_fs(url, **with_secrets(options))
        except ImportError as error:
            extra = EXTRAS.get(scheme)
            hint = f"install it with: pip install 'jetcapture[{extra}]'" if extra else str(error)
            raise JetcaptureError(f"{scheme}:// is not available here; {hint}") from error
        except (TypeError, ValueError) as error:
            raise JetcaptureError(f"cannot open {shown}: {one_line(str(error))}") from error
        root = str(path).rstrip("/")
        if isinstance(fs, LocalFileSystem):
            shown = url = f"file://{root}"
        spark_root, settings = in_spark(url, fs.storage_options)
        return cls(fs=fs, root=root, url=url, shown=shown, spark_root=spark_root, settings=settings)

    def files(self, directory: str) -> dict[str, dict[str, Any]]:
        """List the files below `directory`, sorted by path, with the store's listing entries; none if it is missing.

        Paths are relative to the root. Raises JetcaptureError, also if a subdirectory cannot be listed, which fsspec's
        own walk of local directories ignores.
        """
        self.fs.invalidate_cache()  # the daemon and compaction keep writing
        top = f"{self.root}/{directory}"
        try:
            local = isinstance(self.fs, LocalFileSystem)
            found = dict(sorted(_local(top))) if local else self.fs.find(top, detail=True)
        except FileNotFoundError:
            return {}
        except Exception as error:  # fsspec backends raise different errors
            raise JetcaptureError(f"cannot list {self.shown}: {one_line(error)}") from error
        cut = len(self.root) + 1
        return {str(path)[cut:]: info for path, info in found.items()}

    def of_keys(self, stream: str, keys: Iterable[str | None]) -> list[str]:
        """Return the directories that may hold messages of `keys`: those of the keys, and all bundles."""
        top = f"{self.root}/{stream}"
        self.fs.invalidate_cache()
        try:
            entries = [str(path).rstrip("/").rpartition("/")[2] for path in self.fs.ls(top, detail=False)]
        except FileNotFoundError:
            entries = []
        except Exception as error:  # fsspec backends raise different errors
            raise JetcaptureError(f"cannot list {self.shown}: {one_line(error)}") from error
        bundles = sorted(name for name in entries if name.startswith(f"{layout.BUNDLE}="))
        own = (f"{layout.KEY}={layout.escape_key(key)}" for key in dict.fromkeys(keys))
        return [f"{stream}/{name}" for name in (*own, *bundles)]

    def no_watermark(self, stream: str) -> JetcaptureError:
        """Return the error for `--complete-only` in an archive without a watermark for the stream."""
        return JetcaptureError(
            f"{self.shown} has no watermark for stream {stream}, which --complete-only needs: omit it"
        )

    @contextmanager
    def reading(self, path: str) -> Iterator[None]:
        """Turn errors of reading the object at `path` into VanishedError or JetcaptureError."""
        try:
            yield
        except FileNotFoundError as error:
            raise self._gone(path) from error
        except (OSError, ValueError, pa.ArrowException) as error:
            raise JetcaptureError(f"cannot read {self.shown}/{path}: {one_line(error)}") from error

    def _gone(self, path: str) -> VanishedError:
        """Return the error for an object that was listed; a worker of Spark may have another disk than the driver."""
        top = path.partition("/")[0]
        if not self.fs.exists(f"{self.root}/{top}"):
            return VanishedError(f"{self.shown}/{top} does not exist on {socket.gethostname()}: {SHARE}")
        return VanishedError(f"{self.shown}/{path} is gone: compacted or removed meanwhile; read it again")

    def entries(self) -> list[str]:
        """List the names in the root; return none on failure, because they only supplement an error message."""
        try:
            return [str(path).rpartition("/")[2] for path in self.fs.ls(self.root, detail=False)]
        except Exception:
            return []

    def known_streams(self) -> str:
        """List the archived streams as a suffix for an error about an unknown stream."""
        streams = ", ".join(sorted(entry for entry in self.entries() if not entry.startswith(("_", "."))))
        return f"; there are: {streams}" if streams else ""

    def require(self, spark: SparkSession) -> None:
        """Raise JetcaptureError with a remedy if Spark has no file system for this place.

        With Spark Connect, that only shows on reading: see `explained`.
        """
        if is_remote():
            return
        hadoop: Any = spark._jvm
        context: Any = spark._jsc
        try:
            hadoop.org.apache.hadoop.fs.FileSystem.getFileSystemClass(self._scheme, context.hadoopConfiguration())
        except Exception as error:  # py4j wraps whatever the class loader threw
            raise JetcaptureError(_missing(self._scheme)) from error

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn Spark Connect's error about a missing file system into a JetcaptureError with a remedy."""
        try:
            yield
        except PySparkException as error:
            if not _NO_FILE_SYSTEM.search(str(error)):
                raise
            raise JetcaptureError(_missing(self._scheme)) from error

    @property
    def _scheme(self) -> str:
        return self.spark_root.partition("://")[0]


def modified(entry: Mapping[str, Any]) -> float | None:
    """Return the modification time in a listing entry, in seconds since the epoch; None without one."""
    for name in _MODIFIED:
        value = entry.get(name)
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


def _local(directory: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the files below a local directory, with sizes in bytes and times in seconds since the epoch."""
    return ((path, {"size": one.st_size, "mtime": one.st_mtime}) for path, one in files_below(directory))


def _missing(scheme: str) -> str:
    text = f"Spark cannot read {scheme}:// URLs: it has no file system for them on its class path"
    if _SCHEMES.get(scheme, scheme) not in _MODULES:
        return text
    version = _hadoop_version()
    note = "" if version else ", with the version of Spark's Hadoop"
    return (
        f"{text}; start it with --packages {_package(scheme, version or 'VERSION')}{note}, or use the slower "
        "--engine arrow (in Python engine='arrow')"
    )


def spark_settings(*urls: str | None) -> dict[str, str]:
    """Return settings of a new Spark session that reads and writes these URLs: Maven packages for its Hadoop version,
    and, for S3, AWS's default credentials chain."""
    version = _hadoop_version()
    schemes = (url.partition("://")[0] for url in urls if url is not None and "://" in url)
    wanted = dict.fromkeys(_SCHEMES.get(scheme, scheme) for scheme in schemes)
    packages = [_package(scheme, version) for scheme in wanted if scheme in _MODULES and version]
    settings = {"spark.jars.packages": ",".join(packages)} if packages else {}
    if "s3a" in wanted:
        settings["spark.hadoop.fs.s3a.aws.credentials.provider"] = _AWS_DEFAULT
    return settings


def _package(scheme: str, version: str) -> str:
    return f"org.apache.hadoop:{_MODULES[_SCHEMES.get(scheme, scheme)]}:{version}"


def _hadoop_version() -> str | None:
    """Return the version in the name of Spark's Hadoop jar; None without one."""
    names = (path.name for path in Path(_find_spark_home(), "jars").glob("hadoop-client-api-*.jar"))
    return next((name.removeprefix("hadoop-client-api-").removesuffix(".jar") for name in names), None)


def in_spark(url: str, options: Mapping[str, Any], env: Mapping[str, str] = os.environ) -> tuple[str, dict[str, str]]:
    """Translate a URL and fsspec's `options` to Spark's URL, and settings for a reader or writer."""
    scheme, separator, path = url.rstrip("/").partition("://")
    if not separator:
        return url, {}
    scheme = _SCHEMES.get(scheme, scheme)
    if scheme == "abfss":
        return _azure(url, options, env)
    return f"{scheme}://{path}", _s3(options) if scheme == "s3a" else {}


def _s3(options: Mapping[str, Any]) -> dict[str, str]:
    """Translate s3fs options to S3A settings. Without credentials, both use AWS's default credentials chain."""
    client: Mapping[str, Any] = options.get("client_kwargs") or {}
    key = options.get("key") or options.get("username") or client.get("aws_access_key_id")
    secret = options.get("secret") or options.get("password") or client.get("aws_secret_access_key")
    token = options.get("token") or client.get("aws_session_token")
    endpoint = options.get("endpoint_url") or client.get("endpoint_url")
    region = client.get("region_name")
    found: dict[str, str | None] = {}
    provider = None
    if options.get("anon"):
        provider = "AnonymousAWSCredentialsProvider"
    elif key and secret:
        found |= {"access.key": key, "secret.key": secret, "session.token": token}
        provider = "TemporaryAWSCredentialsProvider" if token else "SimpleAWSCredentialsProvider"
    elif options.get("profile"):
        found["auth.profile.name"] = options["profile"]
        provider = "auth.ProfileAWSCredentialsProvider"
    if provider:
        found["aws.credentials.provider"] = f"org.apache.hadoop.fs.s3a.{provider}"
    if endpoint:
        found |= {"endpoint": endpoint, "path.style.access": "true", "endpoint.region": region or "us-east-1"}
    elif region:
        found["endpoint.region"] = region
    if options.get("requester_pays"):
        found["requester.pays.enabled"] = "true"
    return {f"fs.s3a.{name}": str(value) for name, value in found.items() if value}


def _azure(url: str, options: Mapping[str, Any], env: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Translate a URL and adlfs options to ABFS, where URLs and names of settings contain the account."""

    def given(name: str) -> str | None:
        return options.get(name) or env.get(f"AZURE_STORAGE_{name.upper()}") or None

    authority, _, path = url.partition("://")[2].partition("/")
    container, _, host = authority.partition("@")
    parts = dict(part.split("=", 1) for part in (given("connection_string") or "").split(";") if "=" in part)
    account = parts.get("AccountName") or given("account_name")
    host = host or options.get("account_host") or ""
    if not host and account:
        host = f"{account}.dfs.{parts.get('EndpointSuffix', 'core.windows.net')}"
    if not host:
        raise JetcaptureError(f"{url}: the storage account is missing: --option account_name=…")
    host = host.replace(".blob.", ".dfs.", 1)
    found = _azure_login(parts.get("AccountKey"), parts.get("SharedAccessSignature"), given)
    settings = {f"fs.azure.{name}.{host}": value for name, value in found.items()}
    scheme = "abfss"
    endpoint = urlsplit(parts.get("BlobEndpoint", ""))
    if endpoint.port is not None:  # Azurite: no host per account, and only the blob protocol
        settings |= _EMULATOR | {"fs.azure.abfs.endpoint": f"{endpoint.hostname}:{endpoint.port}"}
        scheme = "abfs" if endpoint.scheme == "http" else scheme
    return f"{scheme}://{container}@{host}/{path}".rstrip("/"), settings


def _azure_login(key: str | None, sas: str | None, given: Callable[[str], str | None]) -> dict[str, str]:
    key, sas = key or given("account_key"), sas or given("sas_token")
    client, secret, tenant = given("client_id"), given("client_secret"), given("tenant_id")
    if key:
        return {"account.auth.type": "SharedKey", "account.key": key}
    if sas:
        return {"account.auth.type": "SAS", "sas.fixed.token": sas.removeprefix("?")}
    if client and secret and tenant:
        return {
            "account.auth.type": "OAuth",
            "account.oauth.provider.type": "org.apache.hadoop.fs.azurebfs.oauth2.ClientCredsTokenProvider",
            "account.oauth2.client.id": client,
            "account.oauth2.client.secret": secret,
            "account.oauth2.client.endpoint": f"https://login.microsoftonline.com/{tenant}/oauth2/token",
        }
    return {}
