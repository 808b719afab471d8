"""Which driver stores, and that an option means the same to both."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from azure.storage.blob import AccountSasPermissions, ResourceTypes, generate_account_sas

from jetcapture_py.config.model import StoreConfig, parse
from jetcapture_py.errors import ConfigError, PermanentStoreError
from jetcapture_py.manage.check import check
from jetcapture_py.store import configured_store, driver_of, open_store
from tests.integration.store.conftest import AzurePlace, S3Place
from tests.integration.store.test_object_storage import NAME, put
from tests.support import azurite
from tests.support.nats_server import NatsServer
from tests.support.running import Command, publish, settings

KEYS: dict[str, Any] = {"key": "k", "secret": "s"}
HERE: dict[str, Any] = {**KEYS, "endpoint_url": "http://127.0.0.1:9"}


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """AWS's tools find only what is in this file, which is not there yet."""
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    return tmp_path / "config"


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://bucket/x", HERE),
        ("s3a://bucket/{key}", {**KEYS, "client_kwargs": {"region_name": "eu-west-1"}}),
        (
            "s3://bucket/x",
            {
                "anon": True,
                "use_ssl": True,
                "requester_pays": True,
                "default_block_size": 1 << 20,
                "client_kwargs": {"endpoint_url": "https://s3.example.com", "verify": False},
                "config_kwargs": {
                    "connect_timeout": 1,
                    "read_timeout": 2,
                    "signature_version": "s3v4",
                    "retries": {"mode": "standard", "max_attempts": 3},
                    "s3": {"addressing_style": "virtual"},
                },
                "s3_additional_kwargs": {
                    "ServerSideEncryption": "aws:kms",
                    "SSEKMSKeyId": "k",
                    "BucketKeyEnabled": True,
                },
            },
        ),
        ("az://box/x", {"account_name": "a", "account_key": "YQ==", "connection_timeout": 1, "read_timeout": 2}),
        ("abfs://box@a.dfs.core.windows.net/x", {"sas_token": "?sv=1&sig=2", "blocksize": 1}),
        ("abfss://box/x", {"account_name": "a", "client_id": "c", "client_secret": "s", "tenant_id": "t"}),
        ("az://box/x", {"account_name": "a", "anon": True}),
    ],
)
def test_obstore_is_taken_if_it_has_an_equivalent_of_every_option(url: str, options: dict[str, Any]) -> None:
    assert driver_of(open_store(url, options, "auto")) == {"driver": "obstore"}


@pytest.mark.parametrize(
    ("url", "options", "reason"),
    [
        ("s3://bucket", {**HERE, "s3_additional_kwargs": {"ACL": "private"}}, "s3_additional_kwargs.ACL"),
        (
            "s3://bucket",
            {**HERE, "config_kwargs": {"s3": {"use_accelerate_endpoint": True}}},
            "use_accelerate_endpoint",
        ),
        ("s3://bucket", KEYS, "the bucket's region"),
        ("s3://bucket", {**KEYS, "client_kwargs": {"region_name": "cn-north-1"}}, "the address of cn-north-1"),
        ("s3://bucket", {"profile": "nobody"}, "ProfileNotFound"),
        ("s3://bucket/a//b", HERE, "directories with names such as '..', or without one"),
        ("s3://bucket/a/../b", HERE, "directories with names such as '..', or without one"),
        ("s3://arn:aws:s3:eu-west-1:1:accesspoint/x", HERE, "access points"),
        ("az://box", {"account_name": "a", "account_key": "YQ==", "location_mode": "secondary"}, "location_mode"),
        ("abfs://box@a.dfs.core.chinacloudapi.cn", {"account_name": "a", "account_key": "YQ=="}, "chinacloudapi"),
    ],
)
def test_fsspec_stores_what_obstore_cannot_and_says_why(url: str, options: dict[str, Any], reason: str) -> None:
    found = driver_of(open_store(url, options, "auto"))
    assert found["driver"] == "fsspec"
    assert reason in found["reason"]
    with pytest.raises(ConfigError, match=r"^store\.driver: ") as caught:
        open_store(url, options, "obstore")
    assert reason in str(caught.value)
    assert driver_of(open_store(url, options, "fsspec")) == {"driver": "fsspec"}


def test_an_environment_or_a_profile_that_names_another_endpoint_is_obeyed_or_left_to_fsspec(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere.write_text("[default]\nregion = eu-west-1\n")
    assert driver_of(open_store("s3://bucket", {}, "auto")) == {"driver": "obstore"}
    nowhere.write_text("[default]\nregion = eu-west-1\nendpoint_url = http://127.0.0.1:9\n")
    assert "endpoint_url in the profile" in driver_of(open_store("s3://bucket", {}, "auto"))["reason"]
    monkeypatch.setenv("AWS_USE_FIPS_ENDPOINT", "true")
    assert "AWS_USE_FIPS_ENDPOINT" in driver_of(open_store("s3://bucket", KEYS, "auto"))["reason"]
    monkeypatch.setenv("AWS_SERVER_SIDE_ENCRYPTION", "aws:kms")
    assert "would obey AWS_SERVER_SIDE_ENCRYPTION" in driver_of(open_store("s3://bucket", HERE, "auto"))["reason"]


def test_the_endpoint_of_the_environment_is_used(moto: S3Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto.options["client_kwargs"]["endpoint_url"])
    put(moto.open("", {"key": "k", "secret": "s"}), b"content")
    assert moto.objects() == {NAME.path: b"content"}


def test_without_obstore_or_for_other_stores_fsspec_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert driver_of(open_store("memory://x", {}, "auto")) == {"driver": "fsspec"}
    for url in ("memory://x", "/archive"):
        with pytest.raises(ConfigError, match="obstore is for S3 and Azure"):
            open_store(url, {}, "obstore")
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    assert "jetcapture[fast]" in driver_of(open_store("s3://bucket", HERE, "auto"))["reason"]
    with pytest.raises(ConfigError, match=r"store\.driver: obstore is not installed"):
        configured_store(StoreConfig(url="s3://bucket", options=HERE, driver="obstore"))


def test_objects_get_the_storage_class_and_the_encryption_of_the_options(moto: S3Place) -> None:
    extra = {"StorageClass": "STANDARD_IA", "ServerSideEncryption": "AES256"}
    put(moto.open("", {**moto.options, "s3_additional_kwargs": extra}), b"content")
    head = moto.client.head_object(Bucket=moto.bucket, Key=f"archive/{NAME.path}")
    assert {name: head[name] for name in extra} == extra


def test_a_shared_access_signature_may_write(azure: AzurePlace) -> None:
    endpoint = str(azure.options["connection_string"]).split("BlobEndpoint=")[1].rstrip(";")

    def options(permission: AccountSasPermissions) -> dict[str, Any]:
        until = datetime.now(UTC) + timedelta(hours=1)
        types = ResourceTypes(object=True, container=True)
        sas = generate_account_sas(azurite.NAME, azurite.KEY, types, permission, until)
        return {"connection_string": f"BlobEndpoint={endpoint};SharedAccessSignature={sas};AccountName={azurite.NAME}"}

    put(azure.open("", options(AccountSasPermissions(read=True, write=True, create=True))), b"content")
    assert azure.objects() == {NAME.path: b"content"}
    with pytest.raises(PermanentStoreError) as caught:
        azure.open("", options(AccountSasPermissions(list=True))).probe()
    assert "sig=" not in str(caught.value)


def test_check_and_the_log_name_the_driver_and_why(
    moto: S3Place, nats_server: Callable[..., NatsServer], tmp_path: Path, driver: str
) -> None:
    url, options = nats_server().url, dict(moto.options)
    if driver == "fsspec":
        options["s3_additional_kwargs"] = {"ACL": "private"}
    asyncio.run(publish(url, [("orders.a", b"content", None)]))
    configuration = settings(url, moto.url, store={"options": options})
    with Command(tmp_path, configuration) as command:
        command.start("--until-caught-up")
        assert command.wait() == 0, command.log
    (event,) = command.events("store.driver")
    said = {each.about: each.text for each in asyncio.run(check(parse(configuration))).items}
    assert event["driver"] == driver
    assert said["store"] == f"a probe was written and removed through {driver}"
    reasons = [event.get("reason", ""), said.get("store.driver", "")]
    assert ["ACL" in each for each in reasons] == [driver == "fsspec"] * 2
    assert len([name for name in moto.objects() if name.startswith("ORDERS/")]) == 1
