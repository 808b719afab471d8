"""`python -m jetcapture_py` and the script `jetcapture`."""

import os
import signal
import sys


def main() -> None:
    """Run the command line."""
    # numpy's linear algebra, which nothing here uses, would start a thread per core that spins (0.13 s of CPU each)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if sys.argv[1:2] == ["run"] and not os.isatty(0):  # a closing terminal may end it: nothing has been received
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # until the supervisor handles it: imports take long
    from jetcapture_py import cli

    cli.main()


if __name__ == "__main__":
    main()
