"""`python -m jetcapture_py` is the `jetcapture` command."""

from jetcapture_py.cli import main

main()
