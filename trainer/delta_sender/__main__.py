"""``python -m delta_sender``: the command ``delta-send``."""

import sys

from delta_sender.cli import main

if __name__ == "__main__":
    sys.exit(main())
