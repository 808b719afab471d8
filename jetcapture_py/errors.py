"""The errors that jetcapture raises on purpose, and what callers do about them.

    JetcaptureError
    ├── ConfigError         the configuration is wrong: print the problems, exit 2
    ├── SourceError         NATS cannot serve us and waiting will not help: exit 1
    ├── DrainError          the drain left messages unacknowledged: exit 1; they are delivered again
    └── StoreError          an object could not be stored: retry, hold the data
        ├── ConflictError         another process changed a table or a note first: plan the change again
        ├── VanishedError         an object that was listed is gone: removed by maintenance; list again
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
    """The server refuses permanently: no such stream, wrong password, consumer deleted, connection closed."""


class DrainError(JetcaptureError):
    """Not everything was stored and acknowledged before the end. Nothing is lost: the server delivers it again."""


class MissingStreamError(SourceError):
    """The stream does not exist."""


class StoreError(JetcaptureError):
    """An object was not stored. The block must be held and the store tried again."""


class ConflictError(StoreError):
    """Another process has changed a table or a note since it was loaded. Load it again, and plan the change again."""


class VanishedError(StoreError):
    """An object that was listed is gone: a compaction has replaced it, or somebody has removed it. List again."""


class FullStoreError(StoreError):
    """An object was not stored, because the disk is full or a quota is used up."""


class PermanentStoreError(StoreError):
    """An object was not stored, and an operator must fix the cause. Reported immediately; retried while held."""
