"""`check` says how a bucket or container protects objects, and what it may not know is no problem."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from azure.storage.blob import BlobServiceClient, ContainerSasPermissions, RetentionPolicy, generate_container_sas

from jetcapture_py.config.model import parse
from jetcapture_py.manage.check import check
from jetcapture_py.rewriting.erase import Erasure, erase
from jetcapture_py.rewriting.select import Condition
from jetcapture_py.store import open_store
from tests.integration.store.conftest import AzurePlace, Place, S3Place, bucket
from tests.support.archives import HOUR, encoded
from tests.support.azurite import KEY, NAME
from tests.support.running import STREAM
from tests.support.versity import Versity, options

pytestmark = pytest.mark.parametrize("driver", ["fsspec"])  # which asks, whatever stores
ABOUT = ("encryption", "versions", "lock")


def facts(place: Place, settings: dict[str, Any] | None = None) -> dict[str, tuple[str, str]]:
    """Level and text of what `check` says; it has no problem but that no NATS server is there."""
    store = {"url": place.url, "options": dict(place.options) if settings is None else settings}
    found = asyncio.run(check(parse({"source": {"stream": STREAM, "consumer": "archive"}, "store": store, **NOWHERE})))
    assert [each.about for each in found.problems] == ["connection"]
    return {each.about: (each.level, each.text) for each in found.items if each.about in ABOUT}


NOWHERE = {"nats": {"servers": ["nats://127.0.0.1:9"]}}


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
    """A real S3 server whose buckets may have versions."""
    with Versity(tmp_path_factory.mktemp("versity"), versions=True) as server:
        yield server


def test_without_permission_nothing_is_known_and_nothing_fails(keeping: Versity, driver: str) -> None:
    keeping.add_user("writer", "writer-secret", role="user")
    with bucket(keeping.endpoint, options(keeping.endpoint)) as place:
        policy = {
            "Statement": [
                {
                    "Effect": "Allow",
                    "Principal": ["writer"],
                    "Action": ["s3:PutObject", "s3:GetObject", "s3:DeleteObject", "s3:ListBucket"],
                    "Resource": [f"arn:aws:s3:::{place.bucket}", f"arn:aws:s3:::{place.bucket}/*"],
                }
            ]
        }
        place.client.put_bucket_policy(Bucket=place.bucket, Policy=json.dumps(policy))
        found = facts(place, options(keeping.endpoint, "writer", "writer-secret"))
        assert {level for level, _ in found.values()} == {"skipped"}
        assert found["versions"][1] == "not known: s3:GetBucketVersioning is not permitted"
        assert found["lock"][1] == "not known: s3:GetBucketObjectLockConfiguration is not permitted"


@pytest.fixture
def restorable(azure_connection: str) -> Iterator[None]:
    """Deleted blobs can be restored."""
    with BlobServiceClient.from_connection_string(azure_connection) as service:
        service.set_service_properties(delete_retention_policy=RetentionPolicy(enabled=True, days=7))
        yield
        service.set_service_properties(delete_retention_policy=RetentionPolicy(enabled=False))


def test_azure_tells_its_encryption_lock_and_soft_delete(azure: AzurePlace, restorable: None, driver: str) -> None:
    found = facts(azure)
    assert {level for level, _ in found.values()} == {"ok"}
    assert found["encryption"][1] == "Azure encrypts each object with the account's key"
    assert found["lock"][1] == "the container has no legal hold and no immutability policy"
    assert found["versions"][1].startswith("deleted objects can be restored for 7 days (soft delete); only the account")
    store = open_store(azure.url, azure.options)
    block = encoded([(seq, HOUR * 1_000_000 + seq) for seq in (1, 2)], bucket=HOUR)
    store.put(block.name, block.data)

    def erased() -> Erasure:
        section = {"url": azure.url, "options": dict(azure.options)}
        config = parse({"source": {"stream": STREAM, "consumer": "archive"}, "store": section})
        return asyncio.run(erase(config, Condition(seqs=(2, 2)), "request 4711"))

    text = "deleted objects can be restored for 7 days, because the account has soft delete"
    first, second = erased(), erased()
    assert (first.remaining, text in first.notes) == ([text], False)
    assert (second.remaining, text in second.notes) == ([], True)
    assert "old versions that Azure may keep" in first.notes


def test_azure_tells_nothing_to_a_token_that_may_only_write(azure: AzurePlace, driver: str) -> None:
    allowed = ContainerSasPermissions(read=True, write=True, create=True, delete=True, list=True)
    until = datetime.now(UTC) + timedelta(hours=1)
    name = azure.client.container_name
    token = generate_container_sas(NAME, name, account_key=KEY, permission=allowed, expiry=until)
    address = azure.client.url.rpartition("/")[0]
    connection = f"BlobEndpoint={address};SharedAccessSignature={token}"
    found = facts(azure, {"connection_string": connection})
    assert {level for level, _ in found.values()} == {"skipped"}
    assert all(text.startswith("not known: ") for _, text in found.values())
