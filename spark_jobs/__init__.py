"""PySpark jobs over an archive, and JetStream as a Spark data source.

archive     `read_archive`, `read_latest`, `read_stream`, `read_bucket` and `archive_view`; implemented in `reading`
query       SQL over an archive (`sql`), printed, written or published
compact     merges small and overlapping objects; implemented in `jetcapture_py.compaction`
replay      publishes archived messages or rows; implemented in `replaying` and `publishing`
datasource  the formats `nats` and `jetcapture`
job         commands, session and error handling of the jobs
java        finds the Java for Spark
"""
