"""`python -m jetcapture_py` and the script `jetcapture`."""

import sys

from jetcapture_py import startup


def main() -> None:
    """Run the command line."""
    if sys.argv[1:2] == ["run"]:
        startup.hold_hangups()  # before the imports, which take a second on a busy machine
    from jetcapture_py import cli

    cli.main()


if __name__ == "__main__":
    main()
