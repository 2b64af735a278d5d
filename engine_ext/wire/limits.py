"""Limit what a part may declare; checked before anything of that size is allocated."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds on what a part may declare.

    Attributes:
        max_header_bytes: Length of the safetensors header JSON.
        max_params: Entries of ``params``.
        max_part_bytes: Length of the decompressed container, header and data.
        max_numel: Elements of one tensor, in checkpoint coordinates.
        max_name_bytes: UTF-8 length of a tensor's name, and of ``sync_id``.
        max_ndim: Dimensions of one tensor.
        max_parts: Parts of one sync.
    """

    max_header_bytes: int = 64 << 20
    max_params: int = 1 << 20
    max_part_bytes: int = 4 << 30
    max_numel: int = 1 << 40
    max_name_bytes: int = 4096
    max_ndim: int = 16
    max_parts: int = 1 << 16
