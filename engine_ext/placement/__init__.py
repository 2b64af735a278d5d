"""Where each checkpoint element is in the live memory of this rank.

A placement is a list of strided segments for each checkpoint tensor (`segments`). It is proven on
the bytes (`certify`), agreed on by all ranks (`ownership`, `plan`), and read and written through
`locator`, `targets`, `live_elements`, `device_batch` and `device_memory`, with the engine's casts
and repacks (`casts`, `repacked`).

Imports: `engine_ext.model`, `engine_ext.format`, `engine_ext.kernels`, and the ground floor.
"""

from engine_ext.placement.casts import as_host, checkpoint_bits, has_nan, live_bits
from engine_ext.placement.certify import Certified, certify_placement, summary, uncertified
from engine_ext.placement.device_batch import DeviceBatch, are_as_read, joined, overwrite
from engine_ext.placement.device_memory import DeviceMemory, Lease
from engine_ext.placement.live_elements import (
    SAMPLED,
    DeviceElements,
    DeviceRows,
    HostElements,
    LiveElements,
    LiveTensors,
    WholeBox,
    box_digest,
    hold_digests,
)
from engine_ext.placement.locator import box_loop
from engine_ext.placement.ownership import boxes, resolve
from engine_ext.placement.plan import Plan, covered, keeps_bits, make_plan, place_again
from engine_ext.placement.repacked import CHUNK, flat_bits, smallest_block, unmoved
from engine_ext.placement.segments import Placed, Placement, Repack, Segment, Status, TensorSpec
from engine_ext.placement.targets import Target, are_whole

__all__ = [
    "CHUNK",
    "SAMPLED",
    "Certified",
    "DeviceBatch",
    "DeviceElements",
    "DeviceMemory",
    "DeviceRows",
    "HostElements",
    "Lease",
    "LiveElements",
    "LiveTensors",
    "Placed",
    "Placement",
    "Plan",
    "Repack",
    "Segment",
    "Status",
    "Target",
    "TensorSpec",
    "WholeBox",
    "are_as_read",
    "are_whole",
    "as_host",
    "box_digest",
    "box_loop",
    "boxes",
    "certify_placement",
    "checkpoint_bits",
    "covered",
    "flat_bits",
    "has_nan",
    "hold_digests",
    "joined",
    "keeps_bits",
    "live_bits",
    "make_plan",
    "overwrite",
    "place_again",
    "resolve",
    "smallest_block",
    "summary",
    "uncertified",
    "unmoved",
]
