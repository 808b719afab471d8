"""An Iceberg table of an archive's complete buckets, in which every engine reads each message once."""
