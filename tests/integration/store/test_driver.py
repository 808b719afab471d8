"""Which driver reaches a store, and what only one of them takes."""

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
from jetcapture_py.store.archive import ArchiveFiles
from jetcapture_py.store.obstore import ObstoreDriver
from tests.integration.store.conftest import AzurePlace, S3Place
from tests.integration.store.test_object_storage import NAME, port_of, put
from tests.support import azurite
from tests.support.nats_server import NatsServer
from tests.support.running import Command, publish, settings

HERE: dict[str, Any] = {"access_key_id": "k", "secret_access_key": "s", "endpoint": "http://127.0.0.1:9"}


def test_obstore_gets_its_own_options() -> None:
    for url, options in (
        ("s3://bucket/x", HERE),
        ("s3://bucket/{key}", {"aws_access_key_id": "k", "aws_secret_access_key": "s", "region": "eu-west-1"}),
        ("s3://bucket", {"skip_signature": True, "request_payer": True, "client_options": {"timeout": "5s"}}),
        ("az://box/x", {"account_name": "a", "account_key": "YQ=="}),
        ("abfs://box@a.dfs.core.windows.net/x", {"sas_key": "?sv=1&sig=2", "retry_config": {"max_retries": 9}}),
        ("gs://bucket/x", {"bearer_token": "t"}),
    ):
        store = configured_store(StoreConfig(url=url, options=options, driver="obstore"))
        assert driver_of(store) == "obstore"


def test_obstore_looks_for_no_login_beside_one_in_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    account = {"account_name": "a"}
    for url, options in (
        ("s3://box", {"AWS_ACCESS_KEY_ID": "k", "aws_secret_access_key": "s"}),
        ("s3://box", {"skip_signature": True}),
        ("az://box", {**account, "access_key": "YQ=="}),
        ("az://box", {**account, "azure_storage_master_key": "YQ=="}),
        ("az://box", {**account, "sas_token": "?sv=1&sig=2"}),
        ("az://box", {**account, "bearer_token": "t"}),
        ("az://box", {**account, "azure_use_azure_cli": True}),
    ):
        assert ObstoreDriver(url, options)._login(options) is None
    assert ObstoreDriver("az://box", account)._login(account) is not None
    monkeypatch.setenv("AZURE_STORAGE_ACCESS_KEY", "YQ==")
    assert ObstoreDriver("az://box", account)._login(account) is None


def test_obstore_finds_the_server_of_an_account_in_its_address() -> None:
    driver = ObstoreDriver("abfs://box@a.dfs.core.chinacloudapi.cn/x", {"account_key": "YQ=="})
    found = driver._client(17).config
    assert (found["account_name"], found["endpoint"]) == ("a", "https://a.blob.core.chinacloudapi.cn")


def test_a_profile_that_is_missing_is_told_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    store = open_store("s3://bucket", {"driver": "obstore", "endpoint": "http://127.0.0.1:9"})
    with pytest.raises(PermanentStoreError, match=r"The config profile \(nobody\) could not be found"):
        store.probe()


@pytest.mark.parametrize(
    ("url", "options", "reason"),
    [
        ("s3://bucket", {**HERE, "endpoint_url_": "x"}, r"store\.options: obstore does not accept them"),
        ("s3://bucket", {"client_options": {"bogus": "1"}}, r"store\.options: obstore does not accept them"),
        ("s3://bucket/a//b", HERE, "directories with names such as"),
        ("s3://{key}/a", HERE, "obstore stores in one bucket"),
        ("memory://x", {}, "obstore is for S3, Azure and Google Cloud Storage, not for memory://"),
        ("/archive", {}, "obstore is not for local directories"),
    ],
)
def test_what_obstore_cannot_do_is_a_wrong_setting(url: str, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        configured_store(StoreConfig(url=url, options=options, driver="obstore"))


def test_google_cloud_storage_needs_obstore_and_obstore_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert driver_of(open_store("memory://x", {})) == "fsspec"
    with pytest.raises(ConfigError, match=r"store\.driver: gs:// needs the driver obstore"):
        open_store("gs://bucket/x", {})
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(ConfigError, match=r"store\.driver: obstore is not installed: pip install 'jetcapture\[fast\]'"):
        configured_store(StoreConfig(url="s3://bucket", options=HERE, driver="obstore"))


def test_objects_get_the_storage_class_and_the_encryption_of_the_options(moto: S3Place, driver: str) -> None:
    extra = {"StorageClass": "STANDARD_IA", "ServerSideEncryption": "AES256"}
    own = {"attributes": {"Storage-Class": "STANDARD_IA"}, "server_side_encryption": "AES256"}
    options = {"s3_additional_kwargs": extra} if driver == "fsspec" else own
    put(moto.open("", {**moto.options, **options}), b"content")
    head = moto.client.head_object(Bucket=moto.bucket, Key=f"archive/{NAME.path}")
    assert {name: head[name] for name in extra} == extra


def test_versions_of_a_bucket_are_listed_read_and_deleted(moto: S3Place, driver: str) -> None:
    moto.client.put_bucket_versioning(Bucket=moto.bucket, VersioningConfiguration={"Status": "Enabled"})
    store, files = moto.open(), ArchiveFiles(moto.url, {**moto.options, "driver": driver})
    store.write_note("S/note", b"first")
    store.write_note("S/note", b"second")
    (version,) = files.old_versions("S")
    assert version.archive.read(version.file) == b"first"
    assert version.archive.again(version.file).size == 5
    version.remove()
    assert list(files.old_versions("S")) == []


def test_a_shared_access_signature_may_write(azure: AzurePlace) -> None:
    endpoint = f"http://127.0.0.1:{port_of(azure)}/{azurite.NAME}"

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


def test_check_and_the_log_name_the_driver(
    moto: S3Place, nats_server: Callable[..., NatsServer], tmp_path: Path, driver: str
) -> None:
    url = nats_server().url
    asyncio.run(publish(url, [("orders.a", b"content", None)]))
    store = {"options": {**moto.options}, "driver": driver}
    store["options"].pop("driver", None)
    configuration = settings(url, moto.url, store=store)
    with Command(tmp_path, configuration) as command:
        command.start("--until-caught-up")
        assert command.wait() == 0, command.log
    (event,) = command.events("store.driver")
    said = {each.about: each.text for each in asyncio.run(check(parse(configuration))).items}
    assert event["driver"] == driver
    assert said["store"] == f"a probe was written and removed through {driver}"
    assert len([name for name in moto.objects() if name.startswith("ORDERS/")]) == 1
