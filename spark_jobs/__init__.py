"""PySpark jobs over an archive, and JetStream as a Spark data source.

archive     `read_archive` and `archive_view`; `reading` has their parts
query       SQL over an archive (`sql`), printed, written or published
compact     merges small and overlapping objects; `compaction` has its parts
replay      publishes archived messages or rows; `replaying` and `publishing` have its parts
report      one HTML page about an archive; `reporting` has its parts
datasource  the `nats` format
job         session, arguments and errors of all jobs
demo        `jetcapture demo`
"""
