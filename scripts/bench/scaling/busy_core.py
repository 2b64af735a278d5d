"""Keep one core busy as a sync does: compare weights that do not fit into its caches.

python -m scripts.bench.scaling.busy_core

Writes a line to stdout when it has begun; ends when its stdin is closed.
"""

from __future__ import annotations

import os
import select
import sys

import numpy as np

from delta_sender.diff.host import compare
from scripts.bench import synthetic_weights
from scripts.bench.scaling.timing import take_new_pages

_PARAMS = 4
_DENSITY = 0.02


def main() -> None:
    """Compare until nobody wants it any more."""
    take_new_pages()
    size = _PARAMS * synthetic_weights.PARAM
    old = synthetic_weights.make_weights(size, np.random.default_rng(0))
    new = synthetic_weights.change(old, _DENSITY, np.random.default_rng(1))
    params = list(synthetic_weights.params(old))
    begun = False
    while True:
        for param in params:
            compare(old[param], new[param], "model.weight", streams=True)
            if not begun:
                print("begun", flush=True)
                begun = True
            if select.select([sys.stdin], [], [], 0)[0] and not os.read(sys.stdin.fileno(), 1):
                return


if __name__ == "__main__":
    main()
