"""Compare live memory with the tracked digest in the background, at a bounded share of one core.

`scrubber` is the thread of one rank. It reads a tensor in small pieces, and judges it only if
nothing was written meanwhile.

Imports: `engine_ext.apply` and the rooms below it.
"""

from engine_ext.scrub.scrubber import Scrubber

__all__ = ["Scrubber"]
