"""Translate a `store.url` and its options to Hadoop's URL, packages and settings.

The settings go to each reader and writer (`ArchiveLocation.settings`) and never into the session's configuration, so
secrets in them do not appear on command lines, in event logs or in Spark's UI.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyspark.errors import PySparkException
from pyspark.find_spark_home import _find_spark_home
from pyspark.sql import SparkSession
from pyspark.sql.utils import is_remote

from jetcapture_py.errors import JetcaptureError
from jetcapture_py.store.archive import ArchiveFiles, open_archive
from jetcapture_py.store.obstore import as_fsspec

_SCHEMES = {"s3": "s3a", "az": "abfss", "abfs": "abfss", "gcs": "gs"}
_MODULES = {"s3a": "hadoop-aws", "abfss": "hadoop-azure", "gs": "hadoop-gcp"}
_NO_FILE_SYSTEM = re.compile(r"No FileSystem for scheme|ClassNotFoundException: Class \S*FileSystem not found")
_AWS_DEFAULT = "software.amazon.awssdk.auth.credentials.DefaultCredentialsProvider"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveLocation:
    """An archive for Spark: its files, and how Spark reads them."""

    files: ArchiveFiles
    spark_root: str
    """The archive's root in Spark."""
    settings: Mapping[str, str] = field(repr=False)
    """Options for Spark's readers and writers. May contain secrets."""

    @classmethod
    def open(cls, url: str, options: Mapping[str, Any]) -> ArchiveLocation:
        """Open `url` with `store.options`. Raises JetcaptureError."""
        files = open_archive(url, options)
        spark_root, settings = in_spark(files.url, files.storage_options)
        return cls(files=files, spark_root=spark_root, settings=settings)

    def require(self, spark: SparkSession) -> None:
        """Raise JetcaptureError with a remedy if Spark has no file system for this location.

        With Spark Connect, that only shows on reading: see `explained`.
        """
        if is_remote():
            return
        hadoop: Any = spark._jvm
        context: Any = spark._jsc
        try:
            hadoop.org.apache.hadoop.fs.FileSystem.getFileSystemClass(self._scheme, context.hadoopConfiguration())
        except Exception as error:  # py4j wraps the class loader's exception
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
    """Translate a URL and the driver's `options` to Spark's URL, and settings for a reader or writer."""
    scheme, separator, path = url.rstrip("/").partition("://")
    if not separator:
        return url, {}
    options = {**as_fsspec(options), **options}
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
    region = client.get("region_name") or options.get("region_name")
    settings: dict[str, str | None] = {}
    provider = None
    if options.get("anon"):
        provider = "AnonymousAWSCredentialsProvider"
    elif key and secret:
        settings |= {"access.key": key, "secret.key": secret, "session.token": token}
        provider = "TemporaryAWSCredentialsProvider" if token else "SimpleAWSCredentialsProvider"
    if provider:
        settings["aws.credentials.provider"] = f"org.apache.hadoop.fs.s3a.{provider}"
    if endpoint:
        settings |= {"endpoint": endpoint, "path.style.access": "true", "endpoint.region": region or "us-east-1"}
    elif region:
        settings["endpoint.region"] = region
    if options.get("requester_pays"):
        settings["requester.pays.enabled"] = "true"
    return {f"fs.s3a.{name}": str(value) for name, value in settings.items() if value}


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
    login = _azure_login(parts.get("AccountKey"), parts.get("SharedAccessSignature"), given)
    settings = {f"fs.azure.{name}.{host}": value for name, value in login.items()}
    scheme = "abfs" if parts.get("DefaultEndpointsProtocol") == "http" else "abfss"
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
