"""Read an archive in Spark."""
