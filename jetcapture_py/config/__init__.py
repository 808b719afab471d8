"""Read and check the configuration file."""
