"""The digest's sums and the gap stream for loops that other packages compile.

The functions take what `engine_ext.format.digest`, `engine_ext.format.gathered_change` and
`engine_ext.format.gap_streams` compile for themselves; `register` makes them known to numba.
"""

from __future__ import annotations

from typing import Final

from engine_ext.format import digest, gap_streams, gathered_change
from engine_ext.format.manifest import skip_symbol
from engine_ext.kernels import made_once

DIGEST_FACTORS: Final = digest._TABLE
"""Both lanes' factors a, uint64."""

BYTE_SKIP: Final = skip_symbol(1)
"""The symbol of one byte that skips as many elements."""

digest_seeds = digest._seeds
"""Return both lanes' seeds of a tensor's name."""

digest_sums = digest._sparse_loop
"""``(seed0, seed1, factors, places, new, old)``: both lanes' sums of a change; ascending places."""

gather_change = gathered_change._gather_loop
"""``(live, shift, seed0, seed1, factors, places, values, differences, offsets, old, new)``.

Fill the last three and return both lanes' sums of the change. `live` is a run of live memory, in
which the element of flat index i is at ``i - shift``; `places` and `offsets` are int32 or int64,
and the places ascend; `values` are new bits, or new minus old ones if `differences` is True and not
None.
"""

write_gaps = gap_streams._write_loop
"""``(places, following, skip, out)``: write symbols; return their number, -1 if not ascending."""


@made_once
def register() -> None:
    """Register the functions with numba; ImportError if it is not installed."""
    from numba.extending import register_jitable

    gathered_change.register()
    register_jitable(digest_sums)
    register_jitable(gather_change)
    register_jitable(write_gaps)
