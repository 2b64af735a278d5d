"""The contents of a live ``torch.nn.Module``: its tensors, by address and by name.

The storage index (`storage_index`), a walk over what a module reaches (`module_walk`), numbers and
other objects without parts (`leaves`), snapshots of a model around a dry run (`state_guard`),
hashes of tensors (`fingerprint`), and which tensors are constants (`constants`).

Imports: `engine_ext.kernels`, `engine_ext.format`, and the ground floor.
"""

from engine_ext.model.constants import (
    Constants,
    ConstantsWatch,
    Known,
    is_cache,
    is_constant,
    is_default,
    is_filled,
)
from engine_ext.model.fingerprint import hash_memory, hash_tensor, location
from engine_ext.model.leaves import PLAIN, leaves_of, reachable_leaves, same_leaf
from engine_ext.model.module_walk import (
    DEPTH,
    PROCESSING,
    is_processed,
    reachable_containers,
    reachable_tensors,
    takes_part,
    walk,
)
from engine_ext.model.state_guard import (
    AttachedTensor,
    ModelStateGuard,
    TracingError,
    attached_tensors,
    content_changed,
)
from engine_ext.model.storage_index import (
    LiveTensor,
    StorageIndex,
    address_range,
    extent,
    layout,
)

__all__ = [
    "DEPTH",
    "PLAIN",
    "PROCESSING",
    "AttachedTensor",
    "Constants",
    "ConstantsWatch",
    "Known",
    "LiveTensor",
    "ModelStateGuard",
    "StorageIndex",
    "TracingError",
    "address_range",
    "attached_tensors",
    "content_changed",
    "extent",
    "hash_memory",
    "hash_tensor",
    "is_cache",
    "is_constant",
    "is_default",
    "is_filled",
    "is_processed",
    "layout",
    "leaves_of",
    "location",
    "reachable_containers",
    "reachable_leaves",
    "reachable_tensors",
    "same_leaf",
    "takes_part",
    "walk",
]
