"""S3 and Azure through obstore: several times as many small objects a second as fsspec, for a fraction of the CPU.

It stores objects and notes; archives are read through fsspec. Options are those of s3fs and adlfs. One without an
equivalent here is named in `UnsupportedError`, and credentials are found as those packages find them.
"""

from __future__ import annotations

import functools
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa

from jetcapture_py.errors import ConfigError
from jetcapture_py.store import remote
from jetcapture_py.store.remote import EXTRAS, NEW, RemoteStore
from jetcapture_py.text import one_line

_CACHED = timedelta(minutes=10)
"""Credentials that are found are asked for again 5 minutes before this has passed: botocore renews them in time."""
_SMALLEST = 17
"""Requests of up to two to this power bytes have the same timeout; above it, of up to the next power of two."""
_CLIENTS = 64
"""Maximum clients that are kept: one for each bucket and timeout."""
_IRRELEVANT = {
    *("assume_container_exists", "asynchronous", "blocksize", "cache_regions", "default_block_size"),
    *("default_cache_type", "default_fill_cache", "fixed_upload_size", "listings_expiry_time", "loop"),
    *("max_concurrency", "max_paths", "skip_instance_cache", "use_listings_cache", "version_aware"),
}
"""Options of s3fs and adlfs that concern reading, listing, or uploads in parts."""
_ADDRESSED = {"ca_bundle", "endpoint_url", "s3", "services", "use_dualstack_endpoint", "use_fips_endpoint"}
"""Settings of a profile of AWS that change how S3 is reached."""
_ELSEWHERE = re.compile(r"(cn|us-iso\w*|eu-isoe|eusc)-")
"""AWS's regions with other domains than amazonaws.com."""
_ENCRYPTION = {
    "ServerSideEncryption": "server_side_encryption",
    "SSEKMSKeyId": "sse_kms_key_id",
    "BucketKeyEnabled": "sse_bucket_key_enabled",
}
_OBEYED = tuple(
    f"AWS_{name}"
    for name in (
        *("CONDITIONAL_PUT", "ENDPOINT", "REQUEST_PAYER", "S3_EXPRESS", "SERVER_SIDE_ENCRYPTION"),
        *("SSE_BUCKET_KEY_ENABLED", "SSE_CUSTOMER_KEY_BASE64", "SSE_KMS_KEY_ID"),
    )
)
"""Variables of the environment that obstore reads, and botocore and s3fs do not."""
_REGION = "store.options.client_kwargs.region_name"
_AZURE_SCOPE = "https://storage.azure.com/.default"
_STATUS = re.compile(r"status code: (\d+)")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_MESSAGE = re.compile(r"<Message>([^<]+)")
_CAUSE = re.compile(r'(?:message|error): "([^"]+)"')
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(\w+)")


class UnsupportedError(Exception):
    """Why obstore cannot be used."""


class RequestError(Exception):
    """A request failed; `status_code` and `error_code` are the server's answer, None without one."""

    def __init__(self, text: str, status_code: int | None, error_code: str | None) -> None:
        super().__init__(text)
        self.status_code, self.error_code = status_code, error_code


class ElsewhereError(RequestError):
    """The bucket is in another region."""

    def __init__(self) -> None:
        super().__init__(f"the bucket is in another region: set {_REGION}", 301, "PermanentRedirect")


@dataclass(kw_only=True)
class _Settings:
    """What a client is made of."""

    store: dict[str, Any]
    """Of `S3Store` or `AzureStore`."""
    credentials: Callable[[], Any] | None
    """Returns obstore's credentials; None for anonymous requests."""
    http: dict[str, Any] = field(default_factory=dict)
    """Options of the HTTP client."""
    connect_timeout: float
    """Seconds."""
    read_timeout: float
    """Seconds."""
    attempts: int = 1
    """How often a request is made."""
    attributes: dict[str, str] = field(default_factory=dict)
    """Of every object."""
    virtual_host: str = ""
    """The endpoint, if the bucket's name goes before its host."""


class ObstoreStore(RemoteStore):
    """S3 or Azure through obstore. Raises UnsupportedError, ConfigError."""

    driver = "obstore"
    _region: str | None = None  # where the bucket is, once the server has said that it is elsewhere

    def _open(self, resolved: Mapping[str, Any]) -> Any:
        try:
            from obstore.store import AzureStore, S3Store
        except ImportError as error:
            raise UnsupportedError("obstore is not installed: pip install 'jetcapture[fast]'") from error
        if not {"", ".", ".."}.isdisjoint(self.root.rstrip("/").split("/")[1:]):
            raise UnsupportedError("obstore does not write to directories with names such as '..', or without one")
        azure = EXTRAS[self.scheme] == "azure"
        kind: Any = AzureStore if azure else S3Store
        settings = (_azure_settings if azure else _s3_settings)(self.root, resolved)
        self._attributes = settings.attributes
        patience = settings.connect_timeout + settings.read_timeout

        @functools.lru_cache(_CLIENTS)
        def client(bucket: str, exponent: int) -> Any:
            config = {**settings.store, **({"region": self._region} if self._region else {})}
            if settings.virtual_host:
                config["aws_endpoint_url_s3"] = settings.virtual_host.replace("://", f"://{bucket}.", 1)
            return kind(
                bucket.partition("@")[0],
                config=config,
                client_options={
                    "allow_http": True,  # if the endpoint says so
                    "connect_timeout": timedelta(seconds=settings.connect_timeout),
                    "timeout": timedelta(seconds=patience + (1 << exponent) / remote.SLOWEST),
                    **settings.http,
                },
                retry_config={
                    "max_retries": settings.attempts - 1,
                    "retry_timeout": timedelta(seconds=settings.attempts * patience),
                },
                credential_provider=settings.credentials,
            )

        client(self.root.partition("/")[0], _SMALLEST)  # reports wrong values
        return client

    def attempt(self, work: Callable[[Any], Any]) -> Any:
        """Like `RemoteStore.attempt`; go on where the bucket is, if that is another region than the environment's."""
        try:
            return super().attempt(work)
        except ElsewhereError:
            region = _region_of(self.root.partition("/")[0])
            if region in (None, self._region):
                raise
            self._region = region  # before the client
            self.client = self._open(self._resolved)
        return super().attempt(work)

    def _upload(self, client: Any, path: str, data: pa.Buffer, condition: str | None) -> None:
        import obstore

        mode: Any = {None: "overwrite", NEW: "create"}.get(condition, {"e_tag": condition})
        store, key = _located(client, path, data.size)
        content = memoryview(data).cast("B") if data.size else b""  # not copied
        with _explained():
            obstore.put(store, key, content, mode=mode, use_multipart=False, attributes=self._attributes or None)

    def _download(self, client: Any, path: str) -> bytes:
        import obstore

        store, key = _located(client, path)
        with _explained():
            return bytes(obstore.get(store, key).bytes())

    def _info(self, client: Any, path: str) -> str | None:
        import obstore

        store, key = _located(client, path)
        with _explained():
            return obstore.head(store, key)["e_tag"]

    def _list(self, client: Any, path: str) -> Iterable[str]:
        import obstore

        store, key = _located(client, path)
        with _explained():
            found = obstore.list_with_delimiter(store, f"{key}/")
        return [str(each["path"]).rpartition("/")[2] for each in found["objects"]]

    def _remove(self, client: Any, path: str) -> None:
        import obstore

        store, key = _located(client, path)
        with _explained():
            obstore.delete(store, key)


def _located(client: Any, path: str, size: int = 0) -> tuple[Any, str]:
    """Return the client of a bucket for requests of `size` bytes, and the key in the bucket."""
    bucket, _, key = path.partition("/")
    return client(bucket, max(_SMALLEST, (size - 1).bit_length())), key


def open_fast(scheme: str, root: str, options: Mapping[str, Any]) -> ObstoreStore:
    """Open the store at `scheme://root`. Raises UnsupportedError, ConfigError."""
    try:
        return ObstoreStore(scheme, root, options)
    except (UnsupportedError, ConfigError):
        raise
    except Exception as error:  # obstore's own
        raise UnsupportedError(f"obstore does not accept store.options; {one_line(error)}") from error


# ------------------------------------------------------------------ errors


@contextmanager
def _explained() -> Iterator[None]:
    """Turn obstore's errors, which tell the server's answer only as text, into errors that `remote` classifies."""
    try:
        yield
    except Exception as error:
        raise _translated(error) from None  # its text has many lines, and repeats those of its causes


def _translated(error: Exception) -> Exception:
    from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError, UnauthenticatedError

    text, _, details = str(error).partition("\n\nDebug source:")
    if not isinstance(error, BaseError | FileNotFoundError):
        return error
    if "kind: Timeout" in details:
        return TimeoutError("request timed out")
    if "redirect without LOCATION" in text:
        return ElsewhereError()
    status = int(found[1]) if (found := _STATUS.search(text)) else None
    code = found[1] if (found := _CODE.search(text)) else None
    if status is None and isinstance(error, UnauthenticatedError):  # there are no credentials
        return RequestError(text.rpartition("credential provider: ")[2], 401, None)
    if code is None and isinstance(error, AlreadyExistsError | PreconditionError):
        code = "PreconditionFailed"
    if found := _CERTIFICATE.search(details):
        return RequestError(f"certificate verify failed: {found[1]}", None, None)
    reason = _MESSAGE.search(text) or _CAUSE.search(details)
    shown = " ".join(str(each) for each in (status, code, reason[1] if reason else None) if each)
    if status == 404 or isinstance(error, FileNotFoundError):
        return FileNotFoundError(shown or "not found")
    return RequestError(shown or text.rpartition(" - ")[2], status, code)


# ------------------------------------------------------------------ options


def _first(options: dict[str, Any], *names: str) -> Any:
    """Take these options away and return the first that is set."""
    return next((value for value in [options.pop(name, None) for name in names] if value is not None), None)


def _all_taken(**sections: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for options that were not taken away."""
    for section, options in sections.items():
        for name in sorted(options.keys() - (_IRRELEVANT if section == "options" else set())):
            shown = name if section == "options" else f"{section}.{name}"
            raise UnsupportedError(f"obstore has no equivalent of store.options.{shown}")


def _s3_settings(root: str, given: Mapping[str, Any]) -> _Settings:
    options = dict(given)
    if obeyed := [name for name in _OBEYED if name in os.environ]:
        raise UnsupportedError(f"obstore would obey {obeyed[0]}, which has no effect otherwise")
    client, config, extra = (
        dict(options.pop(name, None) or {}) for name in ("client_kwargs", "config_kwargs", "s3_additional_kwargs")
    )
    key = _first(options, "key", "username") or _first(client, "aws_access_key_id")
    secret = _first(options, "secret", "password") or _first(client, "aws_secret_access_key")
    token = _first(options, "token") or _first(client, "aws_session_token")
    endpoint = _first(options, "endpoint_url") or _first(client, "endpoint_url") or _endpoint_of_environment()
    region = _first(client, "region_name") or _first(config, "region_name")
    retries, style = dict(config.pop("retries", None) or {}), dict(config.pop("s3", None) or {})
    addressing = style.pop("addressing_style", None) or "auto"
    http = _certificates(client.pop("verify", None))
    checked = _first(config, "request_checksum_calculation") != "when_required"
    settings: dict[str, Any] = {name: extra.pop(given) for given, name in _ENCRYPTION.items() if given in extra}
    attributes = {"Storage-Class": str(extra.pop("StorageClass"))} if "StorageClass" in extra else {}
    if options.pop("requester_pays", False):
        settings["request_payer"] = True
    for section in (client, options):
        if endpoint or section.get("use_ssl") is True:
            section.pop("use_ssl", None)
    if config.get("signature_version") == "s3v4":
        config.pop("signature_version")
    attempts = retries.pop("total_max_attempts", None) or retries.pop("max_attempts", remote.ATTEMPTS - 1) + 1
    retries.pop("mode", None)
    for harmless in ("max_pool_connections", "response_checksum_validation"):
        config.pop(harmless, None)
    timeouts = config.pop("connect_timeout", remote.CONNECT_TIMEOUT), config.pop("read_timeout", remote.READ_TIMEOUT)
    anonymous, profile = options.pop("anon", False), options.pop("profile", None)
    _all_taken(
        options=options,
        client_kwargs=client,
        config_kwargs={**config, **{f"retries.{each}": 0 for each in retries}, **{f"s3.{each}": 0 for each in style}},
        s3_additional_kwargs=extra,
    )
    bucket = root.partition("/")[0]
    if bucket.startswith("arn:") or bucket.endswith("--x-s3"):
        raise UnsupportedError("obstore is not used for access points and directory buckets")
    session = None
    if not (key or anonymous) or not (region or endpoint):
        session, found = _session(profile)
        region = region or found
    if not endpoint:
        if not region:
            raise UnsupportedError(f"obstore needs the bucket's region: {_REGION}")
        if _ELSEWHERE.match(region):
            raise UnsupportedError(f"obstore does not know the address of {region}")
        settings["virtual_hosted_style_request"] = addressing != "path" and "." not in bucket
    else:
        settings["aws_endpoint_url_s3"] = endpoint
        settings["virtual_hosted_style_request"] = addressing == "virtual"
    return _Settings(
        store={
            **settings,
            "region": region or "us-east-1",
            "skip_signature": bool(anonymous),
            "disable_bulk_delete": True,
            **({"checksum_algorithm": "SHA256"} if checked else {}),
        },
        credentials=None if anonymous else _static(key, secret, token) if key else _aws_credentials(session),
        http=http,
        connect_timeout=timeouts[0],
        read_timeout=timeouts[1],
        attempts=attempts,
        attributes=attributes,
        virtual_host=endpoint if endpoint and addressing == "virtual" else "",
    )


def _endpoint_of_environment() -> str | None:
    """Return the address of S3 in the environment, as botocore does. Raises UnsupportedError."""
    for name in ("AWS_USE_FIPS_ENDPOINT", "AWS_USE_DUALSTACK_ENDPOINT"):
        if os.environ.get(name, "false").lower() == "true":
            raise UnsupportedError(f"obstore has no equivalent of {name}")
    if os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "false").lower() == "true":
        return None
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None


def _region_of(bucket: str) -> str | None:
    """Ask S3 in which region a bucket is; None without an answer. Anyone may ask."""
    endpoint = _endpoint_of_environment() or "https://s3.amazonaws.com"
    request = urllib.request.Request(f"{endpoint}/{bucket}", method="HEAD")  # noqa: S310  the operator's own
    answer: Any
    try:
        answer = urllib.request.urlopen(request, timeout=remote.CONNECT_TIMEOUT)  # noqa: S310
    except urllib.error.HTTPError as error:  # it may not be read, or is elsewhere, and says where
        answer = error
    except OSError:
        return None
    with answer:
        region: str | None = answer.headers.get("x-amz-bucket-region")
    return region


def _certificates(verify: Any) -> dict[str, Any]:
    """Translate botocore's `verify`: whether certificates are checked, or the file of an authority's."""
    if verify is None or verify is True:
        verify = os.environ.get("AWS_CA_BUNDLE")
    if not verify:
        return {"allow_invalid_certificates": True} if verify is False else {}
    try:
        return {"root_certificate": Path(verify).read_bytes()}
    except (OSError, TypeError) as error:
        raise ConfigError(f"store.options: cannot read the certificates; {type(error).__name__}: {verify}") from error


def _session(profile: str | None) -> tuple[Any, str | None]:
    """Return what finds credentials in all the places where AWS's tools look for them, and the region."""
    try:
        import botocore.session  # type: ignore[import-untyped]
    except ImportError as error:
        raise UnsupportedError("obstore needs botocore to find credentials: pip install 'jetcapture[s3]'") from error
    session = botocore.session.Session(profile=profile)
    try:
        unknown = sorted(_ADDRESSED & session.get_scoped_config().keys())
        region = session.get_config_variable("region") or os.environ.get("AWS_REGION")
    except Exception as error:  # botocore's have no common class
        raise UnsupportedError(f"AWS's settings cannot be read; {one_line(error)}") from error
    if unknown:
        raise UnsupportedError(f"obstore has no equivalent of {unknown[0]} in the profile of AWS")
    return session, region


def _static(key: str, secret: str | None, token: str | None) -> Callable[[], Any]:
    login = {"access_key_id": key, "secret_access_key": secret or "", "token": token, "expires_at": None}
    return lambda: login


def _aws_credentials(session: Any) -> Callable[[], Any]:
    from botocore.exceptions import NoCredentialsError  # type: ignore[import-untyped]

    def credentials() -> Any:
        found = session.get_credentials()
        if found is None:
            raise NoCredentialsError
        frozen = found.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _CACHED,
        }

    return credentials


def _azure_settings(root: str, given: Mapping[str, Any]) -> _Settings:
    options = dict(given)
    if server := root.partition("/")[0].partition("@")[2]:
        named, _, domain = server.partition(".")
        if domain not in ("dfs.core.windows.net", "blob.core.windows.net"):
            raise UnsupportedError(f"obstore is not used for {server}")
        options.setdefault("account_name", named)
    account, key, sas, connection, client, secret, tenant = (
        _first(options, name) or os.environ.get(f"AZURE_STORAGE_{name.upper()}")
        for name in (
            *("account_name", "account_key", "sas_token", "connection_string", "client_id", "client_secret"),
            "tenant_id",
        )
    )
    host = _first(options, "account_host")
    anonymous = _first(options, "anon")
    if anonymous is None:
        anonymous = os.environ.get("AZURE_STORAGE_ANON", "false").lower() not in ("false", "0", "f", "")
    timeouts = (
        options.pop("connection_timeout", remote.CONNECT_TIMEOUT),
        options.pop("read_timeout", remote.READ_TIMEOUT),
    )
    if options.get("location_mode") == "primary":
        options.pop("location_mode")
    _all_taken(options=options)
    endpoint = f"https://{host}" if host else None
    if connection:
        parts = dict(part.strip().partition("=")[::2] for part in connection.split(";") if "=" in part)
        get = {name.lower(): value for name, value in parts.items()}.get
        account, key, sas = get("accountname"), get("accountkey"), get("sharedaccesssignature")
        suffix, scheme = get("endpointsuffix", "core.windows.net"), get("defaultendpointsprotocol", "https")
        endpoint = get("blobendpoint", f"{scheme}://{account}.blob.{suffix}").rstrip("/")
        if account is None and endpoint:
            account = endpoint.partition("://")[2].partition(".")[0]
    if not account:
        raise UnsupportedError("store.options has neither account_name nor connection_string")
    credentials: Callable[[], Any] | None = None
    if key:
        login = {"access_key": key, "expires_at": None}
        credentials = lambda: login  # noqa: E731
    elif sas:
        token = {"sas_token": sas.removeprefix("?"), "expires_at": None}
        credentials = lambda: token  # noqa: E731
    elif not anonymous and not connection:
        credentials = _azure_credentials(tenant, client, secret)
    return _Settings(
        store={
            "account_name": account,
            "skip_signature": credentials is None,
            **({"endpoint": endpoint} if endpoint else {}),
        },
        credentials=credentials,
        connect_timeout=timeouts[0],
        read_timeout=timeouts[1],
    )


def _azure_credentials(tenant: str | None, client: str | None, secret: str | None) -> Callable[[], Any]:
    """Return what gets tokens, for a service principal or whatever Azure's libraries find."""
    try:
        from azure.identity import ClientSecretCredential, DefaultAzureCredential
    except ImportError as error:
        raise UnsupportedError("obstore needs azure-identity: pip install 'jetcapture[azure]'") from error
    identity: Any
    if client:
        try:
            identity = ClientSecretCredential(tenant_id=tenant or "", client_id=client, client_secret=secret or "")
        except ValueError as error:
            raise UnsupportedError(one_line(error)) from error
    else:
        identity = DefaultAzureCredential()

    def credentials() -> Any:
        token = identity.get_token(_AZURE_SCOPE)
        return {"token": token.token, "expires_at": datetime.fromtimestamp(token.expires_on, UTC)}

    return credentials
