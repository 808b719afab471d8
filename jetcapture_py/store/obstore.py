"""The driver of S3, Azure and Google Cloud Storage through obstore: several times as many small objects a second as
fsspec, for a fraction of the CPU. Options are those of obstore's stores."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa

from jetcapture_py.errors import ConfigError
from jetcapture_py.store import ports
from jetcapture_py.store.fsspec import KINDS
from jetcapture_py.store.ports import NEW, Entry
from jetcapture_py.text import one_line

_STORES = {"s3": "S3Store", "azure": "AzureStore", "gcs": "GCSStore"}
_CACHED = timedelta(minutes=10)
"""Lifetime of cached credentials; obstore asks again 5 minutes earlier, and botocore renews them in time."""
_SMALLEST = 17
"""Requests of up to 2^17 bytes share a timeout; larger ones share one per power of two."""
_PREFIX = re.compile("^(aws_|azure_storage_|azure_|google_)")
_FSSPEC = {
    "access_key_id": "key",
    "secret_access_key": "secret",
    "session_token": "token",
    "bearer_token": "token",
    "endpoint": "endpoint_url",
    "endpoint_url_s3": "endpoint_url",
    "region": "region_name",
    "default_region": "region_name",
    "skip_signature": "anon",
    "request_payer": "requester_pays",
    "access_key": "account_key",
    "master_key": "account_key",
    "sas_key": "sas_token",
    "authority_id": "tenant_id",
    "identity_endpoint": "msi_endpoint",
}
"""fsspec's names of obstore's options, without their optional prefix."""
_LOGINS = {
    "s3": {"key", "anon", "web_identity_token_file"}
    | {f"container_credentials_{kind}_uri" for kind in ("relative", "full")},
    "azure": {"account_key", "sas_token", "client_id", "token", "anon"}
    | {"use_azure_cli", "use_emulator", "msi_endpoint"},
    "gcs": set[str](),
}
"""Login options by fsspec's names."""
_STATUS = re.compile(r"status code: (\d+)")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_MESSAGE = re.compile(r"<Message>([^<]+)")
_CAUSE = re.compile(r'(?:message|error): "([^"]+)"')
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(\w+)")
_VERSION = "?versionId="


def as_fsspec(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of either driver under one name: fsspec's, if it has one."""
    plain = {name: _PREFIX.sub("", str(name).lower()) for name in options}
    return {_FSSPEC.get(plain[name], plain[name]): value for name, value in options.items()}


class ObstoreError(Exception):
    """A request failed; `status_code` and `error_code` are the server's answer, None without one."""

    def __init__(self, text: str, status_code: int | None, error_code: str | None) -> None:
        super().__init__(text)
        self.status_code, self.error_code = status_code, error_code


class ObstoreDriver:
    """One bucket or container. Raises ConfigError."""

    conditional = True

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        scheme, _, rest = url.partition("://")
        if scheme not in KINDS:
            raise ConfigError(f"store.driver: obstore is for S3, Azure and Google Cloud Storage, not for {scheme}://")
        self.kind, self.options = KINDS[scheme], options
        authority, _, path = rest.rstrip("/").partition("/")
        self._bucket, _, host = authority.partition("@")
        self.root = f"{self._bucket}/{path}".rstrip("/")
        if "{key}" in self._bucket:
            raise ConfigError("store.url: obstore stores in one bucket, which cannot contain {key}")
        if not {"", ".", ".."}.isdisjoint(path.split("/") if path else ()):
            raise ConfigError(
                "store.url: obstore does not write to directories with names such as '..', or without one"
            )
        config = {name: value for name, value in options.items() if name not in ("client_options", "retry_config")}
        self._attributes = config.pop("attributes", None)
        given = as_fsspec(config)
        if host and "account_name" not in given:
            config["account_name"] = host.partition(".")[0]
        if host and "endpoint_url" not in given:  # not every cloud of Azure has the same domain
            config["endpoint"] = f"https://{host.replace('.dfs.', '.blob.', 1)}"
        if self.kind == "s3":
            config.setdefault("disable_bulk_delete", True)
        self._client = functools.cache(functools.partial(self._open, config, options))
        try:
            self._client(_SMALLEST)
        except ImportError as error:
            raise ConfigError("store.driver: obstore is not installed: pip install 'jetcapture[fast]'") from error
        except Exception as error:  # obstore's own
            text = one_line(str(error).partition("\n\nDebug source:")[0])
            raise ConfigError(f"store.options: obstore does not accept them; {text}") from error

    def _open(self, config: Mapping[str, Any], options: Mapping[str, Any], exponent: int) -> Any:
        """Return a client for requests of up to 2^`exponent` bytes."""
        import obstore.store

        patience = ports.CONNECT_TIMEOUT + ports.READ_TIMEOUT
        return getattr(obstore.store, _STORES[self.kind])(
            self._bucket,
            config=config,
            client_options={
                "allow_http": True,  # if the endpoint says so
                "connect_timeout": timedelta(seconds=ports.CONNECT_TIMEOUT),
                "timeout": timedelta(seconds=patience + (1 << exponent) / ports.SLOWEST),
                **options.get("client_options", {}),
            },
            retry_config={
                "max_retries": ports.ATTEMPTS - 1,
                "retry_timeout": timedelta(seconds=ports.ATTEMPTS * patience),
                **options.get("retry_config", {}),
            },
            credential_provider=self._login(config),
        )

    def _login(self, config: Mapping[str, Any]) -> Any:
        """Return a credential provider like the cloud's own tools; None if obstore has or finds credentials."""
        of_environment = {name: "" for name in os.environ if self.kind == "azure" and name.startswith("AZURE_STORAGE_")}
        if _LOGINS[self.kind] & as_fsspec({**of_environment, **config}).keys():
            return None
        with suppress(ImportError):
            if self.kind == "s3":
                return _AwsLogin()
            if self.kind == "azure":
                from obstore.auth.azure import AzureCredentialProvider

                return AzureCredentialProvider()
        return None

    def _located(self, path: str, size: int = 0) -> tuple[Any, str]:
        """Return the client for a request of `size` bytes, and the key in the bucket."""
        return self._client(max(_SMALLEST, (size - 1).bit_length())), path.partition("/")[2]

    # ------------------------------------------------------------------ the port

    def list(self, directory: str, *, deep: bool = True) -> Iterator[Entry]:
        import obstore

        client, key = self._located(directory)
        with _explained():
            if not deep:
                listing = obstore.list_with_delimiter(client, key or None)
                yield from (Entry(f"{self._bucket}/{prefix}", directory=True) for prefix in listing["common_prefixes"])
                yield from (self._entry(item) for item in listing["objects"] if item["path"] != key)
                return
            empty: list[Entry] = []
            for page in obstore.list(client, key or None, chunk_size=1000):
                for item in page:
                    entry = self._entry(item)
                    if entry.size:
                        yield entry
                    else:
                        empty.append(entry)
        # a directory marker has the directory's name, and lies beside its files
        yield from (entry for entry in empty if not self._is_marker(entry))

    def _is_marker(self, entry: Entry) -> bool:
        import obstore

        client, key = self._located(entry.path)
        with _explained():
            listing = obstore.list_with_delimiter(client, key)
        return bool(listing["common_prefixes"] or listing["objects"])

    def _entry(self, item: Mapping[str, Any]) -> Entry:
        tag = item["version"] if self.kind == "gcs" else item["e_tag"]
        return Entry(f"{self._bucket}/{item['path']}", item["size"], item["last_modified"].timestamp(), tag)

    def read(self, path: str, start: int = 0, end: int | None = None) -> bytes:
        """Read a file, or an old version of it: `path` may end in `?versionId=`."""
        import obstore

        path, _, version = path.partition(_VERSION)
        client, key = self._located(path, 0 if end is None else end - start)
        options: dict[str, Any] = {} if end is None else {"range": (start, end)}
        if version:
            options["version"] = version
        with _explained():
            return bytes(obstore.get(client, key, options=options).bytes())  # type: ignore[arg-type]

    def stat(self, path: str) -> Entry:
        import obstore

        path, _, version = path.partition(_VERSION)
        client, key = self._located(path)
        with _explained():
            if version:
                return self._entry(obstore.get(client, key, options={"version": version, "head": True}).meta)
            return self._entry(obstore.head(client, key))

    def write(self, path: str, data: pa.Buffer, condition: str | None) -> None:
        import obstore

        mode: Any = {None: "overwrite", NEW: "create"}.get(
            condition, {"version" if self.kind == "gcs" else "e_tag": condition}
        )
        client, key = self._located(path, data.size)
        content = memoryview(data).cast("B") if data.size else b""  # not copied
        with _explained():
            obstore.put(client, key, content, mode=mode, use_multipart=False, attributes=self._attributes)

    def remove(self, path: str, condition: str | None = None) -> None:  # noqa: ARG002  obstore has no condition for it
        import obstore

        client, key = self._located(path)
        with _explained():
            obstore.delete(client, key)

    def locked(self, name: str) -> nullcontext[None]:  # noqa: ARG002  conditions are enough
        return nullcontext()

    # ------------------------------------------------------------------ more than the port

    def upload(self, source: str, path: str) -> None:
        """Write a local file of any size."""
        import obstore

        client, key = self._located(path, Path(source).stat().st_size)
        with _explained():
            obstore.put(client, key, Path(source), attributes=self._attributes)

    def s3(self, method: str, **request: Any) -> Any:
        """Return S3's answer to a method of boto3's client."""
        return getattr(self._botocore, method)(**request)

    @functools.cached_property
    def _botocore(self) -> Any:
        import botocore.session  # type: ignore[import-untyped]

        given = as_fsspec(self.options)
        return botocore.session.Session().create_client(
            "s3",
            endpoint_url=given.get("endpoint_url"),
            region_name=given.get("region_name"),
            aws_access_key_id=given.get("key"),
            aws_secret_access_key=given.get("secret"),
            aws_session_token=given.get("token"),
        )

    def azure(self) -> None:
        """Return None: obstore cannot read a container's settings."""


class _AwsLogin:
    """The AWS credentials and the region that botocore finds, for obstore.

    Without credentials, the first request says why.
    """

    def __init__(self) -> None:
        import botocore.session

        session, self._reason = botocore.session.Session(), "no credentials were found"
        try:
            region = session.get_config_variable("region")
            self._credentials = session.get_credentials()
        except Exception as error:
            region, self._credentials, self._reason = None, None, one_line(error)
        self.config = {} if region is None else {"region": region}

    def __call__(self) -> dict[str, Any]:
        if self._credentials is None:
            raise ValueError(self._reason)
        frozen = self._credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _CACHED,
        }


# ------------------------------------------------------------------ errors


@contextmanager
def _explained() -> Iterator[None]:
    """Turn obstore's errors, which have the server's answer only as text, into errors that `ports` classifies."""
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
        text = "the bucket is in another region: set store.options.region"
        return ObstoreError(text, 301, "PermanentRedirect")
    status = int(match[1]) if (match := _STATUS.search(text)) else None
    code = match[1] if (match := _CODE.search(text)) else None
    if status is None and isinstance(error, UnauthenticatedError):  # without credentials
        return ObstoreError(text.rpartition("credential provider: ")[2], 401, None)
    if code is None and isinstance(error, AlreadyExistsError | PreconditionError):
        code = "PreconditionFailed"
    if match := _CERTIFICATE.search(details):
        return ObstoreError(f"certificate verify failed: {match[1]}", None, None)
    reason = _MESSAGE.search(text) or _CAUSE.search(details)
    shown = " ".join(str(part) for part in (status, code, reason[1] if reason else None) if part)
    if status == 404 or isinstance(error, FileNotFoundError):
        return FileNotFoundError(shown or "not found")
    return ObstoreError(shown or text.rpartition(" - ")[2], status, code)
