"""What a process may use: cores of its machine, and bytes per second of a link.

Nothing here is a setting; callers give the limits.

Imports: nothing of `engine_ext`.
"""

from engine_ext.resources.cores import usable_cores
from engine_ext.resources.rate_limit import RateLimit

__all__ = ["RateLimit", "usable_cores"]
