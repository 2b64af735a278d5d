"""Compiled loops over the elements of a tensor, for any device.

Gather and scatter by offset, written with numba for the host (`gather_scatter`, `jit`, `simd`) and
with Triton for accelerators (`triton`); NumPy's and PyTorch's operators do the same where these are
not installed.

Imports: `engine_ext.dtypes`. numba and Triton are optional.
"""

from engine_ext.kernels.gather_scatter import (
    AHEAD,
    Bits,
    ElementTable,
    Offsets,
    bits_of,
    host_bits,
    table_of,
    typed,
    warm_up,
)
from engine_ext.kernels.host_link import HostLink, download_box, upload_box
from engine_ext.kernels.jit import array, compile_loop, made_once, made_with_numba
from engine_ext.kernels.simd import (
    LINE,
    differing_mask,
    memory_at,
    popcount,
    prefetch,
    register_intrinsics,
    trailing_zeros,
)
from engine_ext.kernels.staging_stream import StagingStream
from engine_ext.kernels.threads import same_device

__all__ = [
    "AHEAD",
    "LINE",
    "Bits",
    "ElementTable",
    "HostLink",
    "Offsets",
    "StagingStream",
    "array",
    "bits_of",
    "compile_loop",
    "differing_mask",
    "download_box",
    "host_bits",
    "made_once",
    "made_with_numba",
    "memory_at",
    "popcount",
    "prefetch",
    "register_intrinsics",
    "same_device",
    "table_of",
    "trailing_zeros",
    "typed",
    "upload_box",
    "warm_up",
]
