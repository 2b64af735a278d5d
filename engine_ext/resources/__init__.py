"""Resources of a process: cores of its machine, bytes per second of a link, and the collector.

Nothing here is a setting; callers give the limits.

Imports: nothing of `engine_ext`.
"""

from engine_ext.resources.collections import no_full_collections
from engine_ext.resources.cores import usable_cores
from engine_ext.resources.rate_limit import RateLimit

__all__ = ["RateLimit", "no_full_collections", "usable_cores"]
