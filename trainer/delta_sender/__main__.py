"""Run the command ``delta-send`` as ``python -m delta_sender``."""

import sys

from delta_sender.cli import main

if __name__ == "__main__":
    sys.exit(main())
