from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyspark
import pytest

from jetcapture_py.errors import JetcaptureError
from jetcapture_py.store.archive import ArchiveFiles
from spark_jobs.archive import read_archive
from spark_jobs.reading.location import ArchiveLocation, in_spark, spark_settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

KEYS = {"key": "AKIA", "secret": "hidden"}
LOGIN = {"access.key": "AKIA", "secret.key": "hidden"}
SIMPLE = {**LOGIN, "aws.credentials.provider": "org.apache.hadoop.fs.s3a.SimpleAWSCredentialsProvider"}
TEMPORARY = "org.apache.hadoop.fs.s3a.TemporaryAWSCredentialsProvider"
MINIO = {"endpoint": "http://minio:9000", "path.style.access": "true"}


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({}, {}),
        ({"key": None, "secret": "", "client_kwargs": None}, {}),
        (KEYS, SIMPLE),
        ({"username": "AKIA", "password": "hidden"}, SIMPLE),
        ({"client_kwargs": {"aws_access_key_id": "AKIA", "aws_secret_access_key": "hidden"}}, SIMPLE),
        (
            {**KEYS, "token": "session"},
            {**LOGIN, "session.token": "session", "aws.credentials.provider": TEMPORARY},
        ),
        (
            {"anon": True, **KEYS},
            {"aws.credentials.provider": "org.apache.hadoop.fs.s3a.AnonymousAWSCredentialsProvider"},
        ),
        ({"client_kwargs": {"region_name": "eu-west-1"}}, {"endpoint.region": "eu-west-1"}),
        ({"endpoint_url": "http://minio:9000"}, {**MINIO, "endpoint.region": "us-east-1"}),
        (
            {"client_kwargs": {"endpoint_url": "http://minio:9000", "region_name": "here"}},
            {**MINIO, "endpoint.region": "here"},
        ),
        ({"requester_pays": True}, {"requester.pays.enabled": "true"}),
        (
            {"aws_access_key_id": "k", "secret_access_key": "s", "endpoint": "http://minio:9000", "region": "here"},
            {
                "access.key": "k",
                "secret.key": "s",
                "aws.credentials.provider": "org.apache.hadoop.fs.s3a.SimpleAWSCredentialsProvider",
                **MINIO,
                "endpoint.region": "here",
            },
        ),
    ],
)
def test_s3_options_become_those_of_s3a(options: dict[str, Any], settings: dict[str, str]) -> None:
    expected = {f"fs.s3a.{name}": value for name, value in settings.items()}
    assert in_spark("s3://bucket/nats/", options, {}) == ("s3a://bucket/nats", expected)


ACCOUNT = "acme.dfs.core.windows.net"
OAUTH = {"client_id": "id", "client_secret": "hidden", "tenant_id": "tenant"}


@pytest.mark.parametrize(
    ("url", "options", "root"),
    [
        ("abfs://box/nats", {"account_name": "acme"}, f"box@{ACCOUNT}/nats"),
        ("az://box", {"account_name": "acme"}, f"box@{ACCOUNT}"),
        ("abfss://box@acme.dfs.core.windows.net/a/b", {}, f"box@{ACCOUNT}/a/b"),
        ("az://box@acme.blob.core.windows.net/a", {"account_name": "other"}, f"box@{ACCOUNT}/a"),
        (
            "abfs://box/a",
            {"account_name": "acme", "account_host": "acme.blob.core.chinacloudapi.cn"},
            "box@acme.dfs.core.chinacloudapi.cn/a",
        ),
        (
            "abfs://box/a",
            {"connection_string": "AccountName=acme;EndpointSuffix=core.usgovcloudapi.net"},
            "box@acme.dfs.core.usgovcloudapi.net/a",
        ),
    ],
)
def test_azure_urls_get_the_account_in_them(url: str, options: dict[str, Any], root: str) -> None:
    assert in_spark(url, options, {})[0] == f"abfss://{root}"


@pytest.mark.parametrize(
    ("options", "env", "settings"),
    [
        ({"account_key": "hidden=="}, {}, {"account.auth.type": "SharedKey", "account.key": "hidden=="}),
        (
            {"connection_string": "AccountName=acme;AccountKey=hidden==;EndpointSuffix=core.windows.net"},
            {},
            {"account.auth.type": "SharedKey", "account.key": "hidden=="},
        ),
        ({"sas_token": "?sv=1&sig=hidden"}, {}, {"account.auth.type": "SAS", "sas.fixed.token": "sv=1&sig=hidden"}),
        ({}, {"AZURE_STORAGE_SAS_TOKEN": "sv=1"}, {"account.auth.type": "SAS", "sas.fixed.token": "sv=1"}),
        (
            OAUTH,
            {},
            {
                "account.auth.type": "OAuth",
                "account.oauth.provider.type": "org.apache.hadoop.fs.azurebfs.oauth2.ClientCredsTokenProvider",
                "account.oauth2.client.id": "id",
                "account.oauth2.client.secret": "hidden",
                "account.oauth2.client.endpoint": "https://login.microsoftonline.com/tenant/oauth2/token",
            },
        ),
        ({}, {}, {}),
    ],
)
def test_azure_options_become_settings_of_the_account(
    options: dict[str, Any], env: dict[str, str], settings: dict[str, str]
) -> None:
    expected = {f"fs.azure.{name}.{ACCOUNT}": value for name, value in settings.items()}
    assert in_spark(f"abfss://box@{ACCOUNT}/nats", options, env) == (f"abfss://box@{ACCOUNT}/nats", expected)


def test_an_emulator_without_tls_is_one_by_its_connection_string() -> None:
    account = "DefaultEndpointsProtocol=http;AccountName=acme;AccountKey=hidden==;BlobEndpoint=http://127.0.0.1:1/acme"
    root, settings = in_spark("az://box/nats", {"connection_string": account}, {})
    assert root == f"abfs://box@{ACCOUNT}/nats"
    assert settings == {
        f"fs.azure.account.auth.type.{ACCOUNT}": "SharedKey",
        f"fs.azure.account.key.{ACCOUNT}": "hidden==",
    }


def test_an_azure_url_without_an_account_is_an_error() -> None:
    with pytest.raises(JetcaptureError, match="the storage account is missing"):
        in_spark("abfs://box/nats", {}, {})


@pytest.mark.parametrize("url", ["/var/lib/jetcapture", "file:///var/lib/jetcapture", "hdfs://name/path"])
def test_other_urls_are_left_as_they_are(url: str) -> None:
    assert in_spark(url, KEYS, {}) == (url, {})
    assert spark_settings(url) == {}


def test_a_new_session_gets_the_packages_of_the_hadoop_that_it_has(spark: SparkSession) -> None:
    jvm: Any = spark._jvm
    hadoop = jvm.org.apache.hadoop.util.VersionInfo.getVersion()
    settings = spark_settings("s3://bucket/nats", None, "/local", "az://box/nats", "s3a://other")
    wanted = {f"org.apache.hadoop:hadoop-{name}:{hadoop}" for name in ("aws", "azure")}
    assert set(settings["spark.jars.packages"].split(",")) == wanted
    assert (Path(pyspark.__file__).parent / "jars" / f"hadoop-client-api-{hadoop}.jar").exists()


def test_a_spark_without_the_file_system_is_told_the_package_before_anything_is_listed(spark: SparkSession) -> None:
    unreachable = {"endpoint_url": "http://127.0.0.1:1", **KEYS}
    with pytest.raises(JetcaptureError) as raised:
        read_archive(spark, "s3://bucket/nats", "ORDERS", options=unreachable)
    jvm: Any = spark._jvm
    hadoop = jvm.org.apache.hadoop.util.VersionInfo.getVersion()
    assert f"--packages org.apache.hadoop:hadoop-aws:{hadoop}" in str(raised.value)
    assert "--engine arrow" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_files_are_listed_with_size_and_time_below_a_directory_alone(tmp_path: Path) -> None:
    for path in ("S/key=a/date=x/1.parquet", "S/2.parquet", "T/3.parquet"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"12345"[: int(path[-9])])
    archive = ArchiveFiles(str(tmp_path), {})
    files = {file.path: file for file in archive.below("S")}
    assert {path: file.size for path, file in files.items()} == {"S/key=a/date=x/1.parquet": 1, "S/2.parquet": 2}
    assert files["S/2.parquet"].modified == (tmp_path / "S/2.parquet").stat().st_mtime
    assert list(archive.below("none")) == []


def test_a_directory_that_cannot_be_listed_is_an_error_and_not_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for part in ("S", *["x" * 250] * 18):  # a path that is too long for the system, also for root
        Path(part).mkdir()
        os.chdir(part)
    Path("1.parquet").touch()
    os.chdir(tmp_path)
    with pytest.raises(JetcaptureError, match=r"^cannot list .*File name too long"):
        list(ArchiveFiles(str(tmp_path), {}).below("S"))


def test_a_url_for_every_key_is_no_archive() -> None:
    with pytest.raises(JetcaptureError, match="a separate archive per key"):
        ArchiveLocation.open("s3://bucket-{key}/nats", {})


def test_a_place_does_not_show_its_secrets() -> None:
    place = ArchiveLocation.open("s3://bucket/nats", {**KEYS, "client_kwargs": {"region_name": "here"}})
    assert place.settings["fs.s3a.secret.key"] == "hidden"
    assert "hidden" not in repr(place)
