"""PySpark jobs over an archive, and JetStream as a Spark data source.

    archive   read_archive: objects (what there is) · overlaps (which copies count) · columns (drift) · engine, storage
    query     SQL over an archive
    compact   compact_plan (what to merge) · compact_unit (merge and check one unit) · merge, files
    replay    replay_* : what is published, where to, how fast, what is there already · publishing
    report    report_source, report_data (facts) · report_page and the other report_* (the page)
    nats      the data source: nats_options · nats_read, nats_fetch, nats_offsets, nats_columns · nats_write
    job       session, arguments and errors of all jobs; login: how they log in to NATS

The first module of a line is what users import or run.
"""
