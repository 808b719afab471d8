"""Read how a bucket or container protects its objects: encryption, old versions, and locks against deletion.

S3 reports the bucket's settings, Azure the readable ones of the container and of the account. A setting that cannot be
read becomes an unknown fact, never an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jetcapture_py.errors import StoreError
from jetcapture_py.store.obstore import as_fsspec
from jetcapture_py.store.ports import error_codes
from jetcapture_py.text import one_line, plural

Ask = Callable[..., Any]
"""Calls a method of S3 with the bucket and returns the answer. Raises the library's errors."""
ENCRYPTION, VERSIONS, LOCK = "encryption", "versions", "lock"
"""Subjects of facts."""
_ACCOUNT_KEY = "$account-encryption-key"
_NO_SETTING = {
    "ServerSideEncryptionConfigurationNotFoundError",
    "ObjectLockConfigurationNotFoundError",
    "ObjectLockConfigurationNotFound",
}
"""Error codes of a bucket without the setting."""
_OF_OBSTORE = {
    "server_side_encryption": "ServerSideEncryption",
    "sse_kms_key_id": "SSEKMSKeyId",
    "sse_customer_key_base64": "SSECustomerAlgorithm",
}
"""S3's names of obstore's options."""
_DENIED = {"AccessDenied", "AllAccessDisabled", "AuthorizationFailure", "AuthorizationPermissionMismatch", "403"}
_PERMISSIONS = {
    "get_bucket_encryption": "s3:GetEncryptionConfiguration",
    "get_bucket_versioning": "s3:GetBucketVersioning",
    "get_object_lock_configuration": "s3:GetBucketObjectLockConfiguration",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtectionFact:
    """One setting, in a sentence."""

    about: str
    """`ENCRYPTION`, `VERSIONS` or `LOCK`."""
    text: str
    known: bool = True
    """Whether the setting could be read; otherwise the text has the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """The protection settings of a bucket or container."""

    facts: tuple[ProtectionFact, ...]
    keeps_versions: bool | None = None
    """Whether it may have old versions of objects; None if unknown."""
    deleted_days: int = 0
    """Days that deleted objects can be restored (Azure's soft delete); 0 if none or unknown."""
    unsearched: str = ""
    """Places that may hold old content and cannot be listed; "" for none."""


def s3_protection(ask: Ask, options: Mapping[str, Any]) -> Protection:
    """Return how a bucket of S3 protects objects; `options` are `store.options`, with settings for each object."""
    named = {_OF_OBSTORE[name]: value for name, value in as_fsspec(options).items() if name in _OF_OBSTORE}
    arguments: Mapping[str, Any] = options.get("s3_additional_kwargs") or named
    versions = _answer(ask, "get_bucket_versioning")
    status = versions.get("Status") if isinstance(versions, Mapping) else None
    return Protection(
        facts=(
            _s3_encryption(ask, arguments),
            _fact(VERSIONS, versions, _VERSIONING.get(str(status), _VERSIONING["None"])),
            _s3_lock(ask, arguments),
        ),
        keeps_versions=status in ("Enabled", "Suspended") if isinstance(versions, Mapping) else None,
    )


_VERSIONING = {
    "Enabled": "the bucket keeps old versions of what is compacted, expired or erased: erase deletes those with erased "
    "messages; have a lifecycle rule delete the others",
    "Suspended": "the bucket keeps the old versions that it has, and no new ones: versioning is suspended",
    "None": "the bucket keeps no old versions",
}


def _s3_encryption(ask: Ask, arguments: Mapping[str, Any]) -> ProtectionFact:
    if arguments.get("SSECustomerAlgorithm"):
        return _fact(ENCRYPTION, {}, "store.options encrypt each object with a key of yours (SSE-C)")
    if asked := arguments.get("ServerSideEncryption"):
        return _fact(ENCRYPTION, {}, f"store.options have each object encrypted: {_algorithm(asked, arguments)}")
    answer = _answer(ask, "get_bucket_encryption")
    text = "the bucket has no default encryption, and store.options ask for none"
    rules = answer.get("ServerSideEncryptionConfiguration", {}).get("Rules", ()) if isinstance(answer, Mapping) else ()
    for default in (rule.get("ApplyServerSideEncryptionByDefault") or {} for rule in rules):
        if algorithm := default.get("SSEAlgorithm"):
            key = {"SSEKMSKeyId": default.get("KMSMasterKeyID")}
            text = f"the bucket encrypts new objects: {_algorithm(algorithm, key)}"
    return _fact(ENCRYPTION, answer, text)


def _algorithm(name: str, settings: Mapping[str, Any]) -> str:
    key = settings.get("SSEKMSKeyId")
    return f"{name}, key {one_line(str(key))}" if key else str(name)


def _s3_lock(ask: Ask, arguments: Mapping[str, Any]) -> ProtectionFact:
    answer = _answer(ask, "get_object_lock_configuration")
    lock = answer.get("ObjectLockConfiguration") or {} if isinstance(answer, Mapping) else {}
    default = (lock.get("Rule") or {}).get("DefaultRetention") or {}
    period = next((f"{default[unit]} {unit.lower()}" for unit in ("Days", "Years") if default.get(unit)), "")
    by_options = arguments.get("ObjectLockMode") or arguments.get("ObjectLockLegalHoldStatus") == "ON"
    until = arguments.get("ObjectLockRetainUntilDate")
    if arguments.get("ObjectLockLegalHoldStatus") == "ON":
        text = "store.options put a legal hold on each object: erase cannot delete it while it has one"
    elif mode := arguments.get("ObjectLockMode"):
        text = f"store.options lock each object until {one_line(str(until))} ({mode}): erase cannot delete it before"
    elif default:
        text = f"the bucket locks new objects for {period} ({default.get('Mode')}): erase cannot delete them before"
    elif lock.get("ObjectLockEnabled") == "Enabled":
        text = "the bucket has Object Lock, and locks no object by itself"
    else:
        text = "the bucket has no Object Lock"
    return _fact(LOCK, {} if by_options else answer, text)


def azure_protection(container: Any, service: Any) -> Protection:
    """Return how a container of Azure protects objects.

    `container` and `service` are the properties of the container and of the account, or the errors of asking for them.
    """
    scope = getattr(getattr(container, "encryption_scope", None), "default_encryption_scope", None)
    key = "the account's key" if scope in (None, _ACCOUNT_KEY) else f"the encryption scope {one_line(str(scope))}"
    held = [
        text
        for name, text in (
            ("has_legal_hold", "a legal hold"),
            ("has_immutability_policy", "an immutability policy"),
            ("immutable_storage_with_versioning_enabled", "immutable versions"),
        )
        if getattr(container, name, None)
    ]
    lock = f"the container has {' and '.join(held)}: objects may not be deleted, also not by erase"
    known, days = not isinstance(service, Exception), 0
    if known and (policy := service.get("delete_retention_policy")) is not None and policy.enabled:
        days = int(policy.days or 0)
    versions = "only the account's settings tell whether Azure keeps versions"
    deleted = f"deleted objects can be restored for {plural(days, 'day')} (soft delete)" if days else "no soft delete"
    return Protection(
        facts=(
            _fact(ENCRYPTION, container, f"Azure encrypts each object with {key}"),
            _fact(VERSIONS, service, f"{deleted}; {versions}"),
            _fact(LOCK, container, lock if held else "the container has no legal hold and no immutability policy"),
        ),
        keeps_versions=True if getattr(container, "immutable_storage_with_versioning_enabled", None) else None,
        deleted_days=days,
        unsearched=f"old versions{'' if known else ' and deleted objects'} that Azure may keep",
    )


def _answer(ask: Ask, method: str) -> Any:
    """Return S3's answer, {} if the bucket does not have the setting, or the error."""
    try:
        return ask(method)
    except Exception as error:  # of botocore
        codes = error_codes(error)
        if codes & _NO_SETTING:
            return {}
        if codes & _DENIED or isinstance(error, PermissionError):
            return StoreError(f"{_PERMISSIONS[method]} is not permitted")
        return error


def _fact(about: str, answer: Any, text: str) -> ProtectionFact:
    """Return a fact, or an unknown one with the reason if the answer is an error."""
    if isinstance(answer, Exception):
        reason = str(answer) if isinstance(answer, StoreError) else one_line(answer)
        return ProtectionFact(about=about, text=f"not known: {reason}", known=False)
    return ProtectionFact(about=about, text=text)
