"""Programs for work on the product. They run in a plain checkout: they import the product there.

Its folders come last, so that an installed product, or another tree on the path, goes first.
"""

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(_ROOT / folder) for folder in ("", "server", "trainer")]
