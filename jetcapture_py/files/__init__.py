"""Files of object stores (ADR-20), read from an archive."""

from jetcapture_py.files.reading import ArchivedFile, list_files, read_file, save_file

__all__ = ["ArchivedFile", "list_files", "read_file", "save_file"]
