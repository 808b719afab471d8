"""PySpark jobs over the archive: read, query, replay."""
