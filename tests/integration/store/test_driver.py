"""Which driver reaches a store, and what only one of them takes."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from azure.storage.blob import (
    AccountSasPermissions,
    BlobServiceClient,
    ContainerSasPermissions,
    ResourceTypes,
    RetentionPolicy,
    generate_account_sas,
    generate_container_sas,
)

from jetcapture_py.config.model import StoreConfig, parse
from jetcapture_py.errors import ConfigError, PermanentStoreError
from jetcapture_py.manage.check import check
from jetcapture_py.rewriting.erase import erase
from jetcapture_py.rewriting.select import Condition
from jetcapture_py.store import configured_store, driver_of, open_store
from jetcapture_py.store.archive import ArchiveFiles
from jetcapture_py.store.obstore import ObstoreDriver
from tests.integration.store.conftest import AzurePlace, Place, S3Place, bucket
from tests.integration.store.test_object_storage import NAME, port_of, put
from tests.support import azurite
from tests.support.archives import HOUR, encoded
from tests.support.nats_server import NatsServer
from tests.support.running import STREAM, Command, publish, settings
from tests.support.versity import Versity
from tests.support.versity import options as versity_options

HERE: dict[str, Any] = {"access_key_id": "k", "secret_access_key": "s", "endpoint": "http://127.0.0.1:9"}


def test_obstore_gets_its_own_options(monkeypatch: pytest.MonkeyPatch) -> None:
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
    driver = ObstoreDriver("abfs://box@a.dfs.core.chinacloudapi.cn/x", {"account_key": "YQ=="})
    found = driver._client(17).config
    assert (found["account_name"], found["endpoint"]) == ("a", "https://a.blob.core.chinacloudapi.cn")
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    store = open_store("s3://bucket", {"driver": "obstore", "endpoint": "http://127.0.0.1:9"})
    with pytest.raises(PermanentStoreError, match=r"The config profile \(nobody\) could not be found"):
        store.probe()


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


def test_what_a_driver_cannot_do_is_a_wrong_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert driver_of(open_store("memory://x", {})) == "fsspec"
    with pytest.raises(ConfigError, match=r"store\.driver: gs:// needs the driver obstore"):
        open_store("gs://bucket/x", {})

    def refused(url: str, options: dict[str, Any], reason: str) -> None:
        with pytest.raises(ConfigError, match=reason):
            configured_store(StoreConfig(url=url, options=options, driver="obstore"))

    refused("s3://bucket", {**HERE, "endpoint_url_": "x"}, r"store\.options: obstore does not accept them")
    refused("s3://bucket", {"client_options": {"bogus": "1"}}, r"store\.options: obstore does not accept them")
    refused("s3://bucket/a//b", HERE, "directories with names such as")
    refused("s3://{key}/a", HERE, "obstore stores in one bucket")
    refused("memory://x", {}, "obstore is for S3, Azure and Google Cloud Storage, not for memory://")
    refused("/archive", {}, "obstore is not for local directories")
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    refused("s3://bucket", HERE, r"store\.driver: obstore is not installed: pip install 'jetcapture\[fast\]'")


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
    options = {name: value for name, value in moto.options.items() if name != "driver"}
    configuration = settings(url, moto.url, store={"options": options, "driver": driver})
    with Command(tmp_path, configuration) as command:
        assert command.start("--until-caught-up").wait() == 0, command.log
    (event,) = command.events("store.driver")
    said = {each.about: each.text for each in asyncio.run(check(parse(configuration))).items}
    assert event["driver"] == driver
    assert said["store"] == f"a probe was written and removed through {driver}"
    assert len([name for name in moto.objects() if name.startswith("ORDERS/")]) == 1


# ------------------------------------------------------------------ what check says


ASKED = pytest.mark.parametrize("driver", ["fsspec"])  # which asks, whatever stores
ABOUT = ("encryption", "versions", "lock")


def facts(place: Place, settings: dict[str, Any] | None = None) -> dict[str, tuple[str, str]]:
    """Level and text of what `check` says; it has no problem but that no NATS server is there."""
    nowhere = {"nats": {"servers": ["nats://127.0.0.1:9"]}}
    found = asyncio.run(check(parse({**section(place, settings), **nowhere})))
    assert [each.about for each in found.problems] == ["connection"]
    return {each.about: (each.level, each.text) for each in found.items if each.about in ABOUT}


def section(place: Place, options: dict[str, Any] | None = None) -> dict[str, Any]:
    store = {"url": place.url, "options": dict(place.options) if options is None else options}
    return {"source": {"stream": STREAM, "consumer": "archive"}, "store": store}


@ASKED
def test_s3_tells_its_default_encryption_versions_and_lock(moto: S3Place, driver: str) -> None:
    assert facts(moto) == {
        "encryption": ("ok", "the bucket has no default encryption, and store.options ask for none"),
        "versions": ("ok", "the bucket keeps no old versions"),
        "lock": ("ok", "the bucket has no Object Lock"),
    }
    rule = {"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": "alias/archive"}}
    moto.client.put_bucket_encryption(Bucket=moto.bucket, ServerSideEncryptionConfiguration={"Rules": [rule]})
    moto.client.put_bucket_versioning(Bucket=moto.bucket, VersioningConfiguration={"Status": "Suspended"})
    found = facts(moto)
    assert found["encryption"] == ("ok", "the bucket encrypts new objects: aws:kms, key alias/archive")
    assert "suspended" in found["versions"][1]
    found = facts(moto, {**moto.options, "s3_additional_kwargs": {"ServerSideEncryption": "AES256"}})
    assert found["encryption"] == ("ok", "store.options have each object encrypted: AES256")


@pytest.fixture(scope="module")
def keeping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Versity]:
    with Versity(tmp_path_factory.mktemp("versity"), versions=True) as server:
        yield server


@ASKED
def test_without_permission_nothing_is_known_and_nothing_fails(keeping: Versity, driver: str) -> None:
    keeping.add_user("writer", "writer-secret", role="user")
    with bucket(keeping.endpoint, versity_options(keeping.endpoint)) as place:
        allowed = ["s3:PutObject", "s3:GetObject", "s3:DeleteObject", "s3:ListBucket"]
        resources = [f"arn:aws:s3:::{place.bucket}", f"arn:aws:s3:::{place.bucket}/*"]
        statement = {"Effect": "Allow", "Principal": ["writer"], "Action": allowed, "Resource": resources}
        place.client.put_bucket_policy(Bucket=place.bucket, Policy=json.dumps({"Statement": [statement]}))
        found = facts(place, versity_options(keeping.endpoint, "writer", "writer-secret"))
        assert {level for level, _ in found.values()} == {"skipped"}
        assert found["versions"][1] == "not known: s3:GetBucketVersioning is not permitted"
        assert found["lock"][1] == "not known: s3:GetBucketObjectLockConfiguration is not permitted"


@pytest.fixture
def restorable(azure_connection: str) -> Iterator[None]:
    with BlobServiceClient.from_connection_string(azure_connection) as service:
        service.set_service_properties(delete_retention_policy=RetentionPolicy(enabled=True, days=7))
        yield
        service.set_service_properties(delete_retention_policy=RetentionPolicy(enabled=False))


@ASKED
def test_azure_tells_its_encryption_lock_and_soft_delete(azure: AzurePlace, restorable: None, driver: str) -> None:
    found = facts(azure)
    assert {level for level, _ in found.values()} == {"ok"}
    assert found["encryption"][1] == "Azure encrypts each object with the account's key"
    assert found["lock"][1] == "the container has no legal hold and no immutability policy"
    assert found["versions"][1].startswith("deleted objects can be restored for 7 days (soft delete); only the account")
    block = encoded([(seq, HOUR * 1_000_000 + seq) for seq in (1, 2)], bucket=HOUR)
    azure.open().put(block.name, block.data)
    text = "deleted objects can be restored for 7 days, because the account has soft delete"
    condition = Condition(seqs=(2, 2))
    first, second = (asyncio.run(erase(parse(section(azure)), condition, "request 4711")) for _ in range(2))
    assert (first.remaining, text in first.notes) == ([text], False)
    assert (second.remaining, text in second.notes) == ([], True)
    assert "old versions that Azure may keep" in first.notes


@ASKED
def test_azure_tells_nothing_to_a_token_that_may_only_write(azure: AzurePlace, driver: str) -> None:
    allowed = ContainerSasPermissions(read=True, write=True, create=True, delete=True, list=True)
    until = datetime.now(UTC) + timedelta(hours=1)
    name = azure.client.container_name
    token = generate_container_sas(azurite.NAME, name, account_key=azurite.KEY, permission=allowed, expiry=until)
    address = azure.client.url.rpartition("/")[0]
    connection = f"BlobEndpoint={address};SharedAccessSignature={token}"
    found = facts(azure, {"connection_string": connection})
    assert {level for level, _ in found.values()} == {"skipped"}
    assert all(text.startswith("not known: ") for _, text in found.values())
