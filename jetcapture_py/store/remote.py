"""Object storage: the rules of all drivers, and fsspec. Objects appear atomically; unresponsive stores time out.

Rejected credentials are read again from their source, so they can be rotated at any time.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from jetcapture_py.archive.layout import PROBE, ObjectName, escape_key
from jetcapture_py.errors import ConfigError, ConflictError, PermanentStoreError, StoreError
from jetcapture_py.retry import retried_on_conflict
from jetcapture_py.store.ports import NoteChange
from jetcapture_py.text import one_line

EXTRAS = {"s3": "s3", "s3a": "s3", "abfs": "azure", "abfss": "azure", "az": "azure"}
_MODIFIED = ("mtime", "LastModified", "last_modified", "updated", "created")
"""Keys of an fsspec listing entry that may have the modification time, in order of preference."""
SECRETS = ("key", "secret", "token", "account_key", "sas_token", "connection_string", "client_secret")
"""Options that may be given as a file, `NAME_file`, which is read again when the store rejects its content."""
SINGLE_PUT = 3 << 30
"""s3fs sends objects of up to twice this size as one PUT, so a killed process leaves no unfinished upload."""
CONNECT_TIMEOUT, READ_TIMEOUT = 5, 30
ATTEMPTS, SLOWEST = 2, 128 << 10
"""A request times out after `ATTEMPTS` times both timeouts, plus a second per `SLOWEST` bytes: the libraries' own
timeouts do not cover the wait for S3's `100 Continue`, or for a server that stops reading."""
RENEW = 5.0
"""Minimum seconds between reads of the credentials."""
_CREDENTIALS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "ProfileNotFound",
    "ConfigParseError",
    "ClientAuthenticationError",
    "CredentialUnavailableError",
}
_CREDENTIAL_CODES = {"ExpiredToken", "InvalidToken", "TokenRefreshRequired", "InvalidAccessKeyId"}
_PERMANENT = {"ParamValidationError"}
_THERE = {"PreconditionFailed", "412", "BlobAlreadyExists"}
_CHANGED = {"PreconditionFailed", "412", "ConditionNotMet", "ConditionalRequestConflict", "409"}
"""Error codes of a conditional write after a concurrent change."""
NEW = "*"
"""The condition of a write that there is no such file."""
_NOTES = threading.Lock()
"""Serializes the writers of this process, for stores without conditional writes."""
_UNKNOWN_HEADER = (400, 405, 501)
"""Answers of servers that do not know a header of the request."""
_PASSING = {"BadDigest", "IncompleteBody", "RequestTimeout", *_CREDENTIAL_CODES}
"""Error codes with such an answer that another request may not get."""
_CHECKSUMS = "store.options.config_kwargs.request_checksum_calculation"


def root_of(template: str, key: str | None) -> str:
    """Return the archive's root for `key`; a key of dots only is escaped, because it would be a parent directory."""
    name = escape_key(key)
    return template.replace("{key}", "%2E" * len(name) if not name.strip(".") else name).rstrip("/")


def modified(entry: Mapping[str, Any]) -> float | None:
    """Return the modification time in a listing entry, in seconds since the epoch; None without one."""
    for name in _MODIFIED:
        value = entry.get(name)
        if isinstance(value, str):
            try:
                value = datetime.fromisoformat(value)
            except ValueError:  # not ISO 8601
                continue
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return None


def with_secrets(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `options` with the content of secret files in place of their names. Raises `ConfigError`."""
    found = dict(options)
    for name in SECRETS:
        if (path := found.pop(f"{name}_file", None)) is not None:
            if name in found:
                raise ConfigError(f"store.options: {name} or {name}_file, not both")
            try:
                found[name] = Path(path).read_text().strip()
            except (OSError, UnicodeDecodeError, TypeError) as error:
                raise ConfigError(f"store.options: cannot read {name}_file; {type(error).__name__}: {path}") from error
    return found


def open_remote(scheme: str, root: str, options: Mapping[str, Any]) -> FsspecStore:
    """Open the store at `scheme://root`. Raises `ConfigError` if its package is missing or rejects the options."""
    import fsspec  # not needed for local stores

    try:
        known = fsspec.get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        extra = EXTRAS.get(scheme)
        hint = f"install it with: pip install 'jetcapture[{extra}]'" if extra else str(error)
        raise ConfigError(f"store.url: {scheme}:// is not available here; {hint}") from error
    try:
        return FsspecStore(scheme, root, {**known._get_kwargs_from_urls(f"{scheme}://{root}"), **options})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"store.options: {scheme}:// does not accept them; {one_line(error)}") from error


class RemoteStore(ABC):
    """Object storage with atomic writes. Uploads each object in one request, through the client of a driver.

    Where the store supports it, existing objects are not overwritten: their name determines their content.
    """

    driver: str
    """The value of `store.driver` that chooses this class."""
    reason = ""
    """Why `store.driver: auto` did not choose another one; "" without a reason."""

    def __init__(self, scheme: str, root: str, options: Mapping[str, Any]) -> None:
        self.scheme = scheme
        self.root = root
        self._options = options
        self._resolved = with_secrets(options)
        self._opened = time.monotonic()
        self._opening = threading.Lock()
        self._once = True  # use conditional writes, until the store turns out not to support them
        self.client = self._open(self._resolved)

    # ------------------------------------------------------------------ the driver's requests

    @abstractmethod
    def _open(self, resolved: Mapping[str, Any]) -> Any:
        """Return a client with these options."""

    @abstractmethod
    def _upload(self, client: Any, path: str, data: pa.Buffer, condition: str | None) -> None:
        """Write a file in one request: always (None), if there is none (`NEW`), or if it still has this entity tag."""

    @abstractmethod
    def _download(self, client: Any, path: str) -> bytes:
        """Read a file. Raises FileNotFoundError."""

    @abstractmethod
    def _info(self, client: Any, path: str) -> str | None:
        """Return the entity tag of a file, which every write changes; None if it has none. Raises FileNotFoundError."""

    @abstractmethod
    def _list(self, client: Any, path: str) -> Iterable[str]:
        """Return the names of the files directly in a directory. Raises FileNotFoundError."""

    @abstractmethod
    def _remove(self, client: Any, path: str) -> None: ...

    # ------------------------------------------------------------------ the store

    def put(self, name: ObjectName, data: pa.Buffer) -> str:
        """Store `data` under its name."""
        path = f"{root_of(self.root, name.key)}/{name.path}"
        self._write(path, data, once=self._once)
        return f"{self.scheme}://{path}"

    def probe(self) -> None:
        """Store a small object, and remove it if permitted; do nothing with a root per key."""
        if "{key}" in self.root:
            return
        path = f"{root_of(self.root, None)}/{PROBE}/{uuid.uuid4().hex}"
        self._write(path, pa.py_buffer(b"jetcapture"))
        with contextlib.suppress(Exception):
            self._remove(self.client, path)

    def read_note(self, path: str) -> bytes | None:
        """Read a small file; return None if it does not exist."""
        place = f"{root_of(self.root, None)}/{path}"
        try:
            return bytes(self.attempt(lambda client: self._download(client, place)))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise StoreError(f"cannot read {path}: {_described(error)}") from error

    def list_notes(self, directory: str) -> list[str]:
        """List the small files in a directory; none if it does not exist."""
        place = f"{root_of(self.root, None)}/{directory}"
        try:
            names = self.attempt(lambda client: list(self._list(client, place)))
        except FileNotFoundError:
            return []
        except Exception as error:
            raise StoreError(f"cannot list {directory}: {_described(error)}") from error
        return sorted(f"{directory}/{name}" for name in names)

    def write_note(self, path: str, data: bytes) -> None:
        self._write(f"{root_of(self.root, None)}/{path}", pa.py_buffer(data))

    def change_note(self, path: str, change: NoteChange) -> None:
        """Replace a small file with the result of `change` for its content, if it has not changed meanwhile.

        S3 and Azure support such conditions; in other stores a concurrent change by another process may be lost.
        """
        place = f"{root_of(self.root, None)}/{path}"

        def attempt() -> None:
            with _NOTES if self.scheme not in EXTRAS else contextlib.nullcontext():
                if change(self.read_note(path)) is None:  # the usual case, with a single request
                    return
                tag = self._tag(place)  # before the content, which then has this tag or a later one
                there = self.read_note(path)
                data = change(there)
                # created meanwhile: without its tag, a write would have no condition
                untagged = self._once and tag is None and there is not None and self.scheme in EXTRAS
                if data is not None and (untagged or not self._write_if(place, data, NEW if there is None else tag)):
                    raise ConflictError(f"cannot write {path}: it was changed concurrently each time")

        retried_on_conflict(attempt)

    def _tag(self, path: str) -> str | None:
        """Return the file's entity tag; None without one."""
        if self.scheme not in EXTRAS:
            return None
        try:
            tag: str | None = self.attempt(lambda client: self._info(client, path))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise StoreError(f"cannot read {path}: {_described(error)}") from error
        return tag

    def _write_if(self, path: str, data: bytes, condition: str | None) -> bool:
        """Write a file on a condition of `_upload`; return False if it is not met."""
        condition = condition if self._once else None
        try:
            self._upload_if(path, pa.py_buffer(data), condition)
        except Exception as error:
            gone = condition not in (None, NEW) and isinstance(error, FileNotFoundError)
            if condition and (gone or _is_there(error) or error_codes(error) & _CHANGED):
                return False
            raise self._refused(path, error) from error
        return True

    def _upload_if(self, path: str, data: pa.Buffer, condition: str | None) -> None:
        """Write a file on a condition of `_upload`, or without it if the server turns out to know none."""
        try:
            self.attempt(lambda client: self._upload(client, path, data, condition))
        except Exception as error:
            if condition is None or not _is_unknown_header(error):
                raise
            self.attempt(lambda client: self._upload(client, path, data, None))
            self._once = False

    def _refused(self, path: str, error: Exception) -> StoreError:
        kind = PermanentStoreError if _is_permanent(error) else StoreError
        reason = _described(error)
        checked = (self._options.get("config_kwargs") or {}).get(_CHECKSUMS.rpartition(".")[2]) != "when_required"
        if EXTRAS.get(self.scheme) == "s3" and checked and _is_unknown_header(error):
            reason += f"; if the server does not know checksums, set {_CHECKSUMS}: when_required"
        return kind(f"cannot write {self.scheme}://{path.rsplit('/', 1)[0]}: {reason}")

    def _write(self, path: str, data: pa.Buffer, *, once: bool = False) -> None:
        try:
            try:
                self._upload_if(path, data, NEW if once else None)
            except Exception as error:
                if not once or not (_is_there(error) or _may_be_there(error)):
                    raise
                if not self._found(path):
                    if not _is_there(error):
                        raise
                    # refused because of something invisible, such as an unfinished upload
                    return self._write(path, data)
        except Exception as error:
            raise self._refused(path, error) from error

    def _found(self, path: str) -> bool:
        try:
            self.attempt(lambda client: self._info(client, path))
        except FileNotFoundError:
            return False
        return True

    # ------------------------------------------------------------------ credentials

    def attempt(self, work: Callable[[Any], Any]) -> Any:
        """Return the result of `work` on the client; retry once with new credentials after rejected ones."""
        client = self.client
        try:
            return work(client)
        except Exception as error:
            if _is_unknown_header(error) or not _is_denied(error) or not self._renew(client):
                raise
        return work(self.client)

    def _renew(self, refused: Any) -> bool:
        """Read the credentials again, at most every `RENEW` seconds; return whether the client `refused` has been
        replaced."""
        with self._opening:
            if self.client is refused and time.monotonic() - self._opened >= RENEW:
                self._opened = time.monotonic()
                # a file may be half written, or missing for a moment
                with contextlib.suppress(Exception):
                    resolved = with_secrets(self._options)
                    # Azure's library refreshes credentials that it finds itself, and leaks replaced clients
                    if EXTRAS.get(self.scheme) != "azure" or resolved != self._resolved:
                        self.client, self._resolved = self._open(resolved), resolved
            return self.client is not refused


class FsspecStore(RemoteStore):
    """Any fsspec file system with atomic writes: S3, Azure, Google, memory."""

    driver = "fsspec"

    def _open(self, resolved: Mapping[str, Any]) -> Any:
        import fsspec

        # aiohttp warns about blocking the event loop; this one is fsspec's, in its own thread
        warnings.filterwarnings("ignore", "Sending a large body directly", ResourceWarning)
        options: dict[str, Any] = {"skip_instance_cache": True, **resolved}
        extra, timeouts = EXTRAS.get(self.scheme), [CONNECT_TIMEOUT, READ_TIMEOUT]
        if extra == "azure":
            options = {"connection_timeout": CONNECT_TIMEOUT, "read_timeout": READ_TIMEOUT, **options}
            timeouts = [options["connection_timeout"], options["read_timeout"]]
        elif extra == "s3":
            again = {"mode": "standard", "total_max_attempts": ATTEMPTS}
            config: dict[str, Any] = {
                "connect_timeout": CONNECT_TIMEOUT,
                "read_timeout": READ_TIMEOUT,
                "retries": again,
            }
            options["config_kwargs"] = config = {**config, **options.get("config_kwargs", {})}
            timeouts = [config["connect_timeout"], config["read_timeout"]]
        self._patience = ATTEMPTS * sum(timeouts)
        fs = fsspec.filesystem(self.scheme, **options)
        if extra == "s3":
            fs.retries = 1  # beyond botocore's own
        return fs

    def _upload(self, client: Any, path: str, data: pa.Buffer, condition: str | None) -> None:
        extra = EXTRAS.get(self.scheme)
        options = self.within(client, data.size)
        if condition == NEW:
            options["mode"] = "create"
        elif condition is not None:
            options |= {"IfMatch": condition} if extra == "s3" else _if_match(condition)
        if extra == "s3":
            options["chunksize"] = SINGLE_PUT
        elif extra == "azure":
            options["retry_total"] = 0  # the caller retries, and logs why
            options["max_concurrency"] = 1  # parallel parts would continue after one has failed
        client.pipe_file(path, data.to_pybytes(), **options)

    def _download(self, client: Any, path: str) -> bytes:
        return bytes(client.cat_file(path, **self.within(client)))

    def _info(self, client: Any, path: str) -> str | None:
        found = client.info(path, refresh=True, **self.within(client))
        if found["type"] != "file":
            raise FileNotFoundError(path)
        tag: str | None = found.get("ETag") or found.get("etag")
        return tag

    def _list(self, client: Any, path: str) -> Iterable[str]:
        client.invalidate_cache()
        entries = client.ls(path, detail=True, **self.within(client))
        return [str(each["name"]).rpartition("/")[2] for each in entries if each["type"] == "file"]

    def _remove(self, client: Any, path: str) -> None:
        client.rm_file(path, **self.within(client))

    def within(self, fs: Any, size: int = 0) -> dict[str, Any]:
        """Return the timeout argument for a request of `size` bytes to `fs`."""
        return {"timeout": self._patience + size / SLOWEST} if fs.async_impl else {}


def _if_match(tag: str) -> dict[str, Any]:
    from azure.core import MatchConditions

    return {"etag": tag, "match_condition": MatchConditions.IfNotModified}


def _described(error: BaseException) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return "request timed out"
    return one_line(error)


def _causes(error: BaseException, *, handled: bool = False) -> Iterator[BaseException]:
    """Yield `error` and its causes; with `handled`, also its contexts."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or (seen.__context__ if handled else None)


def error_codes(error: BaseException) -> set[str]:
    """Return the error codes of S3 or Azure, of an error and of what caused it."""
    found = set()
    for each in _causes(error, handled=True):
        code = getattr(each, "error_code", None)
        response = getattr(each, "response", None)
        if isinstance(response, Mapping):
            code = response.get("Error", {}).get("Code")
        found.add(str(getattr(code, "value", code)))
    return found


def _is_unknown_header(error: BaseException) -> bool:
    """Whether the server may have refused a request for a header that it does not know: a condition, or a checksum."""
    responses = (getattr(each, "response", None) for each in _causes(error, handled=True))
    answers = [response.get("ResponseMetadata", {}) for response in responses if isinstance(response, Mapping)]
    statuses = {answer.get("HTTPStatusCode") for answer in answers}
    statuses |= {getattr(each, "status_code", None) for each in _causes(error, handled=True)}
    return not statuses.isdisjoint(_UNKNOWN_HEADER) and not error_codes(error) & _PASSING


def _is_there(error: BaseException) -> bool:
    """Whether a conditional write failed because the object exists.

    Azure's file system also raises FileExistsError while the container is being deleted.
    """
    codes = error_codes(error) - {"None"}
    return bool(codes & _THERE) or (isinstance(error, FileExistsError) and not codes)


def _may_be_there(error: BaseException) -> bool:
    """Whether the object may exist after a connection error: a server may reject a large upload before its end."""
    return not _is_permanent(error) and not any("Timeout" in type(each).__name__ for each in _causes(error))


def _is_denied(error: BaseException) -> bool:
    """Whether new credentials may help."""
    return any(
        isinstance(each, PermissionError)
        or type(each).__name__ in _CREDENTIALS
        or getattr(each, "status_code", None) in (401, 403)
        for each in _causes(error)
    ) or bool(error_codes(error) & _CREDENTIAL_CODES)


def _is_permanent(error: BaseException) -> bool:
    """Whether it needs an operator: credentials, permissions, a missing bucket or container."""
    return _is_denied(error) or any(
        isinstance(each, FileNotFoundError)
        or type(each).__name__ in _PERMANENT
        or getattr(each, "status_code", None) in (301, 404, 405)
        for each in _causes(error)
    )
