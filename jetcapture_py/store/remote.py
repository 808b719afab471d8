"""Object storage through fsspec. An object appears whole or not at all; requests to a silent store time out.

Refused credentials are read again from their source, so they can be rotated at any time.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from jetcapture_py.archive.layout import ObjectName, escape_key
from jetcapture_py.errors import ConfigError, PermanentStoreError, StoreError
from jetcapture_py.text import one_line

NoteChange = Callable[[bytes | None], bytes | None]
"""From a note's content, None where there is none, to its next; None to leave it as it is."""
PROBE = "_probe"
EXTRAS = {"s3": "s3", "s3a": "s3", "abfs": "azure", "abfss": "azure", "az": "azure"}
SECRETS = ("key", "secret", "token", "account_key", "sas_token", "connection_string", "client_secret")
"""Options that may be given as a file, `NAME_file`, which is read again when the store refuses what was in it."""
SINGLE_PUT = 3 << 30
"""s3fs sends objects of up to twice this size as one PUT: nothing is left behind by a process that dies in it."""
CONNECT_TIMEOUT, READ_TIMEOUT = 5, 30
ATTEMPTS, SLOWEST = 2, 128 << 10
"""A request times out after `ATTEMPTS` times both timeouts, plus a second per `SLOWEST` bytes: the libraries' own
timeouts do not cover waiting for S3's permission to send an object, or for a server that stopped reading."""
RENEW = 5.0
"""Seconds between reads of the credentials."""
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
"""Codes for a conditional write of what another writer has changed."""
CHANGES = 10
"""Attempts to change a note that other writers are changing."""
_NOTES = threading.Lock()
"""Serializes the writers of this process, for stores without conditional writes."""
_NOT_IMPLEMENTED = {"NotImplemented", "501"}


def root_of(template: str, key: str | None) -> str:
    """The archive's root for `key`, which alone between two slashes must not be a way up."""
    name = escape_key(key)
    return template.replace("{key}", "%2E" * len(name) if not name.strip(".") else name).rstrip("/")


def with_secrets(options: Mapping[str, Any]) -> dict[str, Any]:
    """`options` with the content of the files that hold some of them. Raises `ConfigError`."""
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
    """The store for `scheme://root`. Raises `ConfigError` when its package is missing or refuses the options."""
    import fsspec  # what stores locally goes without it

    try:
        fsspec.get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        extra = EXTRAS.get(scheme)
        hint = f"install it with: pip install 'jetcapture[{extra}]'" if extra else str(error)
        raise ConfigError(f"store.url: {scheme}:// is not available here; {hint}") from error
    try:
        return FsspecStore(scheme, root, options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"store.options: {scheme}:// does not accept them; {one_line(error)}") from error


class FsspecStore:
    """Any fsspec file system whose writes are atomic: S3, Azure, Google, memory. Objects go up whole, in one call.

    An existing object is left unchanged where the store supports it: its name determines its content.
    """

    def __init__(self, scheme: str, root: str, options: Mapping[str, Any]) -> None:
        self.scheme = scheme
        self.root = root
        self._options = options
        self._resolved = with_secrets(options)
        self._opened = time.monotonic()
        self._opening = threading.Lock()
        self._once = True  # until the store turns out not to support it
        # aiohttp fears for the event loop; this one is fsspec's own, in a thread where nothing else waits
        warnings.filterwarnings("ignore", "Sending a large body directly", ResourceWarning)
        self.fs = self._open(self._resolved)

    def put(self, name: ObjectName, data: pa.Buffer) -> str:
        """Store `data` under its name."""
        path = f"{root_of(self.root, name.key)}/{name.path}"
        self._write(path, data.to_pybytes(), once=self._once)
        return f"{self.scheme}://{path}"

    def probe(self) -> None:
        """Store a small object, and remove it where allowed; does nothing with a root per key."""
        if "{key}" in self.root:
            return
        path = f"{root_of(self.root, None)}/{PROBE}/{uuid.uuid4().hex}"
        self._write(path, b"jetcapture")
        with contextlib.suppress(Exception):
            self.fs.rm_file(path, **self._within(self.fs))

    def read_note(self, path: str) -> bytes | None:
        """A small file's content; None when it does not exist."""
        try:
            return bytes(self.attempt(lambda fs: fs.cat_file(f"{root_of(self.root, None)}/{path}", **self._within(fs))))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise StoreError(f"cannot read {path}: {_said(error)}") from error

    def read_end(self, path: str, size: int) -> bytes:
        """Read the last bytes of an object."""

        def read(fs: Any) -> bytes:
            place = f"{root_of(self.root, None)}/{path}"
            whole = int(fs.info(place, **self._within(fs))["size"])
            return bytes(fs.cat_file(place, start=max(0, whole - size), end=whole, **self._within(fs)))

        try:
            found: bytes = self.attempt(read)
        except Exception as error:
            raise StoreError(f"cannot read {path}: {_said(error)}") from error
        return found

    def write_note(self, path: str, data: bytes) -> None:
        """Replace a small file."""
        self._write(f"{root_of(self.root, None)}/{path}", data)

    def change_note(self, path: str, change: NoteChange) -> None:
        """Replace a small file by what `change` returns for its content, on condition that it is still the same.

        S3 and Azure know such conditions; in other stores a writer in another process may be overtaken.
        """
        place = f"{root_of(self.root, None)}/{path}"
        for _ in range(CHANGES):
            with _NOTES if self.scheme not in EXTRAS else contextlib.nullcontext():
                if change(self.read_note(path)) is None:  # mostly, and then one request will do
                    return
                tag = self._tag(place)  # before the content, which is then that of this tag or a later one
                there = self.read_note(path)
                data = change(there)
                if data is None or self._write_if(place, data, None if there is None else tag, new=there is None):
                    return
        raise StoreError(f"cannot write {path}: it was changed concurrently {CHANGES} times in a row")

    def _tag(self, path: str) -> str | None:
        """The file's entity tag, which every write changes; None without one."""
        if self.scheme not in EXTRAS:
            return None
        try:
            found = self.attempt(lambda fs: fs.info(path, refresh=True, **self._within(fs)))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise StoreError(f"cannot read {path}: {_said(error)}") from error
        tag: str | None = found.get("ETag") or found.get("etag")
        return tag

    def _write_if(self, path: str, data: bytes, tag: str | None, *, new: bool) -> bool:
        """Write a file where there is none (`new`) or the one with this tag; False when it is not so."""
        condition: dict[str, Any] = {}
        if self._once and new:
            condition = {"mode": "create"}
        elif self._once and tag is not None:
            condition = {"IfMatch": tag} if EXTRAS[self.scheme] == "s3" else _if_match(tag)
        try:
            self.attempt(
                lambda fs: fs.pipe_file(path, data, **self._put_options(fs, len(data), once=False), **condition)
            )
        except Exception as error:
            gone = tag is not None and isinstance(error, FileNotFoundError)
            if condition and (gone or _is_there(error) or _codes(error) & _CHANGED):
                return False
            if condition and _codes(error) & _NOT_IMPLEMENTED:
                self._once = False
                return False
            raise self._refused(path, error) from error
        return True

    def _refused(self, path: str, error: Exception) -> StoreError:
        kind = PermanentStoreError if _is_permanent(error) else StoreError
        return kind(f"cannot write {self.scheme}://{path.rsplit('/', 1)[0]}: {_said(error)}")

    def _write(self, path: str, data: bytes, *, once: bool = False) -> None:
        try:
            try:
                self.attempt(lambda fs: fs.pipe_file(path, data, **self._put_options(fs, len(data), once=once)))
            except Exception as error:
                if not once or not (_is_there(error) or _may_be_there(error)):
                    raise
                if not self._found(path):
                    if not _is_there(error):
                        raise
                    return self._write(
                        path, data
                    )  # refused because of something unreadable, such as parts of an upload
        except Exception as error:
            if once and _codes(error) & _NOT_IMPLEMENTED:
                self._once = False
                return self._write(path, data)
            raise self._refused(path, error) from error

    def _found(self, path: str) -> bool:
        """Whether an object is there."""
        try:
            found = self.attempt(lambda fs: fs.info(path, refresh=True, **self._within(fs)))
        except FileNotFoundError:
            return False
        return bool(found["type"] == "file")

    def _put_options(self, fs: Any, size: int, *, once: bool) -> dict[str, Any]:
        options = self._within(fs, size)
        if once:
            options["mode"] = "create"
        if EXTRAS.get(self.scheme) == "s3":
            options["chunksize"] = SINGLE_PUT
        elif EXTRAS.get(self.scheme) == "azure":
            options["retry_total"] = 0  # the caller tries again, and says why
            options["max_concurrency"] = 1  # in parallel, one would continue after another failed
        return options

    def attempt(self, work: Callable[[Any], Any]) -> Any:
        """Return the result of `work` on the file system; retry once with new credentials after a refusal."""
        fs = self.fs
        try:
            return work(fs)
        except Exception as error:
            if not _is_denied(error) or not self._renew(fs):
                raise
        return work(self.fs)

    def _renew(self, refused: Any) -> bool:
        """Read the credentials anew, at most every few seconds; whether there is another file system than `refused`."""
        with self._opening:
            if self.fs is refused and time.monotonic() - self._opened >= RENEW:
                self._opened = time.monotonic()
                with contextlib.suppress(
                    ConfigError, OSError, ValueError, TypeError
                ):  # half written, or away for a moment
                    resolved = with_secrets(self._options)
                    # Azure's library keeps what it reads by itself up to date, and never lets go of a client
                    if EXTRAS.get(self.scheme) != "azure" or resolved != self._resolved:
                        self.fs, self._resolved = self._open(resolved), resolved
            return self.fs is not refused

    def _open(self, resolved: Mapping[str, Any]) -> Any:
        import fsspec

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

    def _within(self, fs: Any, size: int = 0) -> dict[str, Any]:
        """The argument that ends a request of `size` bytes in time."""
        return {"timeout": self._patience + size / SLOWEST} if fs.async_impl else {}


def _if_match(tag: str) -> dict[str, Any]:
    from azure.core import MatchConditions

    return {"etag": tag, "match_condition": MatchConditions.IfNotModified}


def _said(error: BaseException) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return "no answer in time"
    return one_line(error)


def _causes(error: BaseException, *, handled: bool = False) -> Iterator[BaseException]:
    """`error` and what it was raised from; with `handled`, also what was being handled."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or (seen.__context__ if handled else None)


def _codes(error: BaseException) -> set[str]:
    """Return the error code of S3 or Azure."""
    found = set()
    for each in _causes(error, handled=True):
        code = getattr(each, "error_code", None)
        response = getattr(each, "response", None)
        if isinstance(response, Mapping):
            code = response.get("Error", {}).get("Code")
        found.add(str(getattr(code, "value", code)))
    return found


def _is_there(error: BaseException) -> bool:
    """Whether a write that was to replace nothing was refused because there is something.

    Azure's file system says so, too, when it is the container that is being deleted.
    """
    codes = _codes(error) - {"None"}
    return bool(codes & _THERE) or (isinstance(error, FileExistsError) and not codes)


def _may_be_there(error: BaseException) -> bool:
    """Whether a broken connection may be a refusal: a server may refuse a large object before it was sent."""
    return not _is_permanent(error) and not any("Timeout" in type(each).__name__ for each in _causes(error))


def _is_denied(error: BaseException) -> bool:
    """Whether other credentials may help."""
    return any(
        isinstance(each, PermissionError)
        or type(each).__name__ in _CREDENTIALS
        or getattr(each, "status_code", None) in (401, 403)
        for each in _causes(error)
    ) or bool(_codes(error) & _CREDENTIAL_CODES)


def _is_permanent(error: BaseException) -> bool:
    """Whether an operator must fix it: credentials, permissions, a missing bucket or container."""
    return _is_denied(error) or any(
        isinstance(each, FileNotFoundError)
        or type(each).__name__ in _PERMANENT
        or getattr(each, "status_code", None) == 404
        for each in _causes(error)
    )
