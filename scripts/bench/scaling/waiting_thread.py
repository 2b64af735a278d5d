"""Wait in a loop, as a rank of vLLM does for a second after each call.

python -m scripts.bench.scaling.waiting_thread

Yields to other threads in each round. Writes a line to stdout when it has begun; ends when its
parent has closed its stdin.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time

_LOOK_S = 0.05


def main() -> None:
    """Wait until nobody wants it any more."""
    lock, flags = threading.Lock(), memoryview(bytearray(2))
    print("begun", flush=True)
    look = time.monotonic() + _LOOK_S
    while not flags[0]:
        with lock:
            pass
        now = time.monotonic()
        if now > look:
            if select.select([sys.stdin], [], [], 0)[0] and not os.read(sys.stdin.fileno(), 1):
                return
            look = now + _LOOK_S
        os.sched_yield()


if __name__ == "__main__":
    main()
