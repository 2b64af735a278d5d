"""Limit what a part may declare; checked before anything of that size is allocated."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds on what a part may declare."""

    max_header_bytes: int = 64 << 20  # length of the safetensors header JSON
    max_params: int = 1 << 20
    max_part_bytes: int = 4 << 30  # length of the decompressed container, header and data
    max_numel: int = 1 << 40  # elements of one tensor, in checkpoint coordinates
    max_name_bytes: int = 4096  # UTF-8 length of a tensor's name, and of ``sync_id``
    max_ndim: int = 16
    max_parts: int = 1 << 16  # of one sync
