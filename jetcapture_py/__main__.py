"""`python -m jetcapture_py` and the script `jetcapture`."""

import os
import signal
import sys


def main() -> None:
    """Run the command line."""
    if sys.argv[1:2] == ["run"] and not os.isatty(0):  # a closing terminal may end it: nothing has been received
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # until the supervisor handles it: imports take long
    from jetcapture_py import cli

    cli.main()


if __name__ == "__main__":
    main()
