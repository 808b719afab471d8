"""The errors that jetcapture raises on purpose, and how callers react.

    JetcaptureError
    ├── ConfigError         the configuration is wrong: print the problems, exit 2
    ├── SourceError         NATS cannot serve us: exit 1
    │   ├── UnavailableError      no answer; the only one that may pass: ask again
    │   └── ApiError              JetStream refused a request
    │       ├── DeniedError           the user lacks a permission
    │       └── MissingError          no such stream, consumer or message; a subclass for each
    ├── DrainError          the drain left messages unacknowledged: exit 1; they are delivered again
    └── StoreError          an object could not be stored: retry, hold the data
        ├── ConflictError         another process changed a table or a metadata file: plan the change again
        ├── FullStoreError        the disk is full, or a quota is used up
        ├── VanishedError         a listed object is gone, removed by maintenance: list again
        └── PermanentStoreError   retrying alone will not help (no such bucket, access denied): report it immediately

A message that cannot be decoded is not an exception: it is a `Failure` row (see `transform.batch`), in quarantine.
"""


class JetcaptureError(Exception):
    """Base class; its text is one clear line without secrets."""


class ConfigError(JetcaptureError):
    """The configuration cannot be used.

    `problems` holds one line per wrong setting: its path, what was expected, and a suggestion where there is one.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class SourceError(JetcaptureError):
    """NATS cannot serve us. Waiting will not help, unless it is an UnavailableError."""


class UnavailableError(SourceError):
    """No answer to an API request: no leader, no JetStream, or no connection. Try again."""


class ApiError(SourceError):
    """The JetStream API returned an error: `code` as in HTTP, `err_code` as in nats-server's errors.json."""

    def __init__(self, text: str, code: int = 500, err_code: int = 0) -> None:
        super().__init__(text)
        self.code = code
        self.err_code = err_code


class DeniedError(ApiError):
    """The server denies a request, or the subscription to its reply. The text names the missing permission."""

    def __init__(self, text: str) -> None:
        super().__init__(text, 403)


class MissingError(ApiError):
    """The stream, consumer or message does not exist. A server that has just started or elects a leader may be
    wrong."""


class MissingStreamError(MissingError):
    """The stream does not exist."""


class MissingConsumerError(MissingError):
    """The stream has no such consumer."""


class MissingMessageError(MissingError):
    """The stream has no such message."""


class DrainError(JetcaptureError):
    """Not everything was stored and acknowledged before the end. Nothing is lost: the server delivers it again."""


class StoreError(JetcaptureError):
    """An object was not stored. The block must be held and the store tried again."""


class ConflictError(StoreError):
    """Another process has changed a table or a metadata file since it was loaded. Load it and plan the change again."""


class VanishedError(StoreError):
    """A listed object is gone: a compaction has replaced it, or somebody has removed it. List again."""


class FullStoreError(StoreError):
    """An object was not stored, because the disk is full or a quota is used up."""


class PermanentStoreError(StoreError):
    """An object was not stored, and an operator must fix the cause. Reported immediately; retried while held."""
