"""PySpark jobs over an archive, and JetStream as a Spark data source.

archive     `read_archive` and `archive_view`; implemented in `reading`
query       SQL over an archive (`sql`), printed, written or published
compact     merges small and overlapping objects; implemented in `compaction`
replay      publishes archived messages or rows; implemented in `replaying` and `publishing`
datasource  the `nats` format
job         commands, session and error handling of the jobs
demo        `jetcapture demo`
"""
