"""What a live ``torch.nn.Module`` holds: its tensors, by address and by name.

The storage index (`storage_index`), a walk over what a module reaches (`module_walk`), snapshots of
a model around a dry run (`state_guard`), hashes of tensors (`fingerprint`), and which tensors are
constants (`constants`).

Imports: `engine_ext.kernels`, `engine_ext.wire`, and the ground floor.
"""

from engine_ext.model.constants import ConstantsWatch, Known, is_cache, is_constant
from engine_ext.model.fingerprint import hash_tensor, layout, location
from engine_ext.model.module_walk import DEPTH, reachable_containers, reachable_tensors, walk
from engine_ext.model.state_guard import (
    AttachedTensor,
    ModelStateGuard,
    TracingError,
    attached_tensors,
)
from engine_ext.model.storage_index import LiveTensor, StorageIndex, extent

__all__ = [
    "DEPTH",
    "AttachedTensor",
    "ConstantsWatch",
    "Known",
    "LiveTensor",
    "ModelStateGuard",
    "StorageIndex",
    "TracingError",
    "attached_tensors",
    "extent",
    "hash_tensor",
    "is_cache",
    "is_constant",
    "layout",
    "location",
    "reachable_containers",
    "reachable_tensors",
    "walk",
]
