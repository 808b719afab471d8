"""Where Spark reads an archive: its URL and options as Hadoop's file systems know them."""

from __future__ import annotations

from typing import Any

import pytest

from jetcapture_py.errors import JetcaptureError
from spark_jobs.reading.location import ArchiveLocation, in_spark, spark_settings

KEYS = {"key": "AKIA", "secret": "hidden"}
LOGIN = {"access.key": "AKIA", "secret.key": "hidden"}
SIMPLE = {**LOGIN, "aws.credentials.provider": "org.apache.hadoop.fs.s3a.SimpleAWSCredentialsProvider"}
TEMPORARY = {"aws.credentials.provider": "org.apache.hadoop.fs.s3a.TemporaryAWSCredentialsProvider"}
ANONYMOUS = {"aws.credentials.provider": "org.apache.hadoop.fs.s3a.AnonymousAWSCredentialsProvider"}
ADDRESS = "http://minio:9000"
MINIO = {"endpoint": ADDRESS, "path.style.access": "true"}
S3: tuple[tuple[dict[str, Any], dict[str, str]], ...] = (
    ({}, {}),
    ({"key": None, "secret": "", "client_kwargs": None}, {}),
    (KEYS, SIMPLE),
    ({"username": "AKIA", "password": "hidden"}, SIMPLE),
    ({"client_kwargs": {"aws_access_key_id": "AKIA", "aws_secret_access_key": "hidden"}}, SIMPLE),
    ({**KEYS, "token": "session"}, {**LOGIN, "session.token": "session", **TEMPORARY}),
    ({"anon": True, **KEYS}, ANONYMOUS),
    ({"client_kwargs": {"region_name": "eu-west-1"}}, {"endpoint.region": "eu-west-1"}),
    ({"endpoint_url": ADDRESS}, {**MINIO, "endpoint.region": "us-east-1"}),
    ({"client_kwargs": {"endpoint_url": ADDRESS, "region_name": "here"}}, {**MINIO, "endpoint.region": "here"}),
    ({"requester_pays": True}, {"requester.pays.enabled": "true"}),
    (
        {"aws_access_key_id": "AKIA", "secret_access_key": "hidden", "endpoint": ADDRESS, "region": "here"},
        {**SIMPLE, **MINIO, "endpoint.region": "here"},
    ),
)
"""Options of s3fs or obstore, and the settings of S3A that they become."""


def test_s3_options_become_those_of_s3a() -> None:
    for options, settings in S3:
        expected = {f"fs.s3a.{name}": value for name, value in settings.items()}
        assert in_spark("s3://bucket/nats/", options, {}) == ("s3a://bucket/nats", expected)


ACCOUNT = "acme.dfs.core.windows.net"
CHINA = {"account_name": "acme", "account_host": "acme.blob.core.chinacloudapi.cn"}
GOVERNMENT = {"connection_string": "AccountName=acme;EndpointSuffix=core.usgovcloudapi.net"}
AZURE_URLS: tuple[tuple[str, dict[str, str], str], ...] = (
    ("abfs://box/nats", {"account_name": "acme"}, f"box@{ACCOUNT}/nats"),
    ("az://box", {"account_name": "acme"}, f"box@{ACCOUNT}"),
    (f"abfss://box@{ACCOUNT}/a/b", {}, f"box@{ACCOUNT}/a/b"),
    ("az://box@acme.blob.core.windows.net/a", {"account_name": "other"}, f"box@{ACCOUNT}/a"),
    ("abfs://box/a", CHINA, "box@acme.dfs.core.chinacloudapi.cn/a"),
    ("abfs://box/a", GOVERNMENT, "box@acme.dfs.core.usgovcloudapi.net/a"),
)
SHARED_KEY = {"account.auth.type": "SharedKey", "account.key": "hidden=="}
OAUTH = {
    "account.auth.type": "OAuth",
    "account.oauth.provider.type": "org.apache.hadoop.fs.azurebfs.oauth2.ClientCredsTokenProvider",
    "account.oauth2.client.id": "id",
    "account.oauth2.client.secret": "hidden",
    "account.oauth2.client.endpoint": "https://login.microsoftonline.com/tenant/oauth2/token",
}
AZURE: tuple[tuple[dict[str, str], dict[str, str], dict[str, str]], ...] = (
    ({}, {}, {}),
    ({"account_key": "hidden=="}, {}, SHARED_KEY),
    ({"connection_string": "AccountName=acme;AccountKey=hidden==;EndpointSuffix=core.windows.net"}, {}, SHARED_KEY),
    ({"sas_token": "?sv=1&sig=hidden"}, {}, {"account.auth.type": "SAS", "sas.fixed.token": "sv=1&sig=hidden"}),
    ({}, {"AZURE_STORAGE_SAS_TOKEN": "sv=1"}, {"account.auth.type": "SAS", "sas.fixed.token": "sv=1"}),
    ({"client_id": "id", "client_secret": "hidden", "tenant_id": "tenant"}, {}, OAUTH),
)
"""Options of adlfs, the environment, and the settings of the account that they become."""


def test_azure_urls_get_the_account_in_them_and_options_become_settings_of_it() -> None:
    for url, options, root in AZURE_URLS:
        assert in_spark(url, options, {})[0] == f"abfss://{root}"
    for options, environment, settings in AZURE:
        expected = {f"fs.azure.{name}.{ACCOUNT}": value for name, value in settings.items()}
        root = f"abfss://box@{ACCOUNT}/nats"
        assert in_spark(root, options, environment) == (root, expected)
    with pytest.raises(JetcaptureError, match="the storage account is missing"):
        in_spark("abfs://box/nats", {}, {})


def test_an_emulator_without_tls_is_one_by_its_connection_string() -> None:
    account = "DefaultEndpointsProtocol=http;AccountName=acme;AccountKey=hidden==;BlobEndpoint=http://127.0.0.1:1/acme"
    root, settings = in_spark("az://box/nats", {"connection_string": account}, {})
    assert root == f"abfs://box@{ACCOUNT}/nats"
    assert settings == {f"fs.azure.{name}.{ACCOUNT}": value for name, value in SHARED_KEY.items()}


def test_other_urls_are_left_as_they_are() -> None:
    for url in ("/var/lib/jetcapture", "file:///var/lib/jetcapture", "hdfs://name/path"):
        assert in_spark(url, KEYS, {}) == (url, {})
        assert spark_settings(url) == {}


def test_a_url_for_every_key_is_no_archive() -> None:
    with pytest.raises(JetcaptureError, match="a separate archive per key"):
        ArchiveLocation.open("s3://bucket-{key}/nats", {})


def test_a_location_does_not_show_its_secrets() -> None:
    location = ArchiveLocation.open("s3://bucket/nats", {**KEYS, "client_kwargs": {"region_name": "here"}})
    assert location.settings["fs.s3a.secret.key"] == "hidden"
    assert "hidden" not in repr(location)
