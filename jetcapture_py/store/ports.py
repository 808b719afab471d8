"""Interfaces of stores: a user's own (`Store`, and `NoteStore` if it keeps metadata files), and a `Driver`, whose
errors are classified here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, runtime_checkable

import pyarrow as pa

from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.text import one_line

NoteChange = Callable[[bytes | None], bytes | None]
"""Maps a metadata file's content (None without one) to its new content; None leaves it unchanged."""


class Store(Protocol):
    """Stores objects.

    Obligations of `put`: when it returns, the complete object is durable and visible under its name; when it raises, no
    part of it is visible. Putting an object again is not an error. It is called from several threads. After any error,
    the object is held and put again, until `store.retry_for` has passed; `PermanentStoreError` is logged as an error at
    once. It must eventually return or raise: a call that hangs blocks one of `store.concurrency` threads.

    `store.type` names a class or function that is called with `store.url` and `store.options`, and returns a store. One
    that also has the methods of `NoteStore` keeps the watermark. Commands that read the archive open `store.url` with a
    driver.
    """

    def put(self, name: ObjectName, data: pa.Buffer) -> str:
        """Store `data` as `name` and return its location. Raises `StoreError`, `PermanentStoreError`."""
        ...

    def probe(self) -> None:
        """Check that objects can be stored by storing and removing a small one. Raises the errors of `put`."""
        ...


@runtime_checkable
class NoteStore(Protocol):
    """A store that also keeps metadata files, which are rewritten, such as the watermark. Methods raise `StoreError`.

    Paths are relative to the archive's root.
    """

    def read_note(self, path: str) -> bytes | None:
        """Read a file; return None if it does not exist."""
        ...

    def list_notes(self, directory: str) -> list[str]:
        """List the paths of the files directly in a directory; none if it does not exist."""
        ...

    def change_note(self, path: str, change: NoteChange) -> None:
        """Replace a file atomically by the result of `change` for its content, unless that is None.

        Obligation: a concurrent write by another process is not lost; the change is reapplied to it. `change` may be
        called several times; the last result is used.
        """
        ...


NEW = "*"
"""Condition of a write: the file does not exist."""
CONNECT_TIMEOUT, READ_TIMEOUT = 5, 30
ATTEMPTS, SLOWEST = 2, 128 << 10
"""A request times out after `ATTEMPTS` times both timeouts, plus a second per `SLOWEST` bytes: the libraries' own
timeouts do not cover the wait for S3's `100 Continue`, or for a server that stops reading."""


class Entry(NamedTuple):
    """A file or directory as a store describes it."""

    path: str
    size: int = 0
    """Bytes; may be 0 when only one level is listed."""
    modified: float | None = None
    """Modification time in seconds since the epoch; None if the store does not tell."""
    tag: str | None = None
    """Changes with every write; None if the store has none."""
    directory: bool = False


class Driver(Protocol):
    """The port to a store: a driver's few operations, on which everything else is built. Thread-safe.

    Paths begin with `root`. Methods raise FileNotFoundError for a missing file, and FileExistsError for an unmet
    condition; functions below classify all other errors by `status_code`, `error_code`, class or cause.
    """

    @property
    def root(self) -> str:
        """Location of the archive; may contain `{key}`."""
        ...

    @property
    def conditional(self) -> bool:
        """Whether `write` obeys tags. Otherwise, writers of metadata files must be `locked`."""
        ...

    def list(self, directory: str, *, deep: bool = True) -> Iterable[Entry]:
        """List all files below a directory or, unless `deep`, directly in it; nothing if it does not exist."""
        ...

    def read(self, path: str, start: int = 0, end: int | None = None) -> bytes:
        """Read the bytes of a file from `start` to `end` (exclusive); without `end`, the whole file."""
        ...

    def stat(self, path: str) -> Entry:
        """Return the current entry of a file."""
        ...

    def write(self, path: str, data: pa.Buffer, condition: str | None) -> None:
        """Write a complete file: always (None), if it does not exist (`NEW`), or if it still has this tag."""
        ...

    def remove(self, path: str, condition: str | None = None) -> None:
        """Remove a file: always (None) or, if the store can, only if it still has this tag."""
        ...

    def locked(self, name: str) -> AbstractContextManager[None]:
        """Lock `name` against others, if the store has locks."""
        ...


class RemoteDriver(Driver, Protocol):
    """A driver of a store with credentials, which `open_driver` reopens when the store has rejected old ones.

    To add one: write its file; add its name to `StoreConfig.driver`, `StoreConfig._driven` (which passes it on in the
    options), `open_driver` and `driver_of`; its schemes to `config.values`; and options that may be files to
    `credentials.SECRETS`.
    """

    kind: str
    """`s3`, `azure`, `gcs`; "" for others."""
    options: Mapping[str, Any]
    """Options of the store's library, including those in the URL. May contain secrets."""

    def upload(self, source: str, path: str) -> None:
        """Write a local file of any size."""
        ...

    def s3(self, method: str, **request: Any) -> Any:
        """Return S3's answer to a method of boto3's client."""
        ...

    def azure(self) -> Sequence[Any] | None:
        """Return the properties of the container and of the account, or the errors of asking; None if unable to."""
        ...


# ------------------------------------------------------------------ errors

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
_UNKNOWN_HEADER = (400, 405, 501)
"""Answers of servers that do not know a header of the request."""
_PASSING = {"BadDigest", "IncompleteBody", "RequestTimeout", *_CREDENTIAL_CODES}
"""Error codes of such answers that another request may not get."""


def described(error: BaseException) -> str:
    """Return one line about an error, with its notes."""
    if isinstance(error, TimeoutError) and not str(error):
        return "request timed out"
    return "; ".join((one_line(error), *getattr(error, "__notes__", ())))


def causes(error: BaseException, *, handled: bool = False) -> Iterator[BaseException]:
    """Yield `error` and its causes; with `handled`, also its contexts."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or (seen.__context__ if handled else None)


def error_codes(error: BaseException) -> set[str]:
    """Return the error codes of S3 or Azure in an error and its causes."""
    codes = set()
    for cause in causes(error, handled=True):
        code = getattr(cause, "error_code", None)
        response = getattr(cause, "response", None)
        if isinstance(response, Mapping):
            code = response.get("Error", {}).get("Code")
        codes.add(str(getattr(code, "value", code)))
    return codes


def is_unknown_header(error: BaseException) -> bool:
    """Whether the server may have refused a request because of an unknown header: a condition or a checksum."""
    responses = (getattr(cause, "response", None) for cause in causes(error, handled=True))
    answers = [response.get("ResponseMetadata", {}) for response in responses if isinstance(response, Mapping)]
    statuses = {answer.get("HTTPStatusCode") for answer in answers}
    statuses |= {getattr(cause, "status_code", None) for cause in causes(error, handled=True)}
    return not statuses.isdisjoint(_UNKNOWN_HEADER) and not error_codes(error) & _PASSING


def is_there(error: BaseException) -> bool:
    """Whether a conditional write failed because the object exists.

    Azure's file system also raises FileExistsError while the container is being deleted.
    """
    codes = error_codes(error) - {"None"}
    return bool(codes & _THERE) or (isinstance(error, FileExistsError) and not codes)


def is_unmet(error: BaseException) -> bool:
    """Whether the condition of a write or removal was not met."""
    return is_there(error) or bool(error_codes(error) & _CHANGED)


def may_be_there(error: BaseException) -> bool:
    """Whether the object may exist after a connection error: a server may reject a large upload before its end."""
    return not is_permanent(error) and not any("Timeout" in type(cause).__name__ for cause in causes(error))


def is_denied(error: BaseException) -> bool:
    """Whether new credentials may help."""
    return any(
        isinstance(cause, PermissionError)
        or type(cause).__name__ in _CREDENTIALS
        or getattr(cause, "status_code", None) in (401, 403)
        for cause in causes(error)
    ) or bool(error_codes(error) & _CREDENTIAL_CODES)


def is_permanent(error: BaseException) -> bool:
    """Whether an operator must act: credentials, permissions, a missing bucket or container."""
    return is_denied(error) or any(
        isinstance(cause, FileNotFoundError)
        or type(cause).__name__ in _PERMANENT
        or getattr(cause, "status_code", None) in (301, 404, 405)
        for cause in causes(error)
    )
