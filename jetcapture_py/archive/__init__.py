"""The archive's format: paths, columns, footers, encodings and the watermark."""
