from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given

from engine_ext.conformance.toy_models import PlainCopy
from engine_ext.model.storage_index import StorageIndex
from engine_ext.placement.segments import Segment, Status
from engine_ext.startup import LoaderDryRun
from tests.support.served_models import PROPERTY, base_checkpoint, bits, memory, serve
from tests.support.thread_ranks import Shard, shards

pytestmark = pytest.mark.slow


@PROPERTY
@given(shards())
def test_segments_name_the_elements_of_the_shard(shard: Shard) -> None:
    """The placement's checkpoint indices, in the live box's order, are numpy's."""
    model = shard.model()
    served = serve(model, base_checkpoint(model))
    segments = served.placement["w0"].segments
    assert served.placement["w0"].status is Status.EXACT
    assert all(segment.python_copy for segment in segments)
    indices = torch.arange(int(np.prod(shard.shape))).reshape(shard.shape)
    sources = [segment.source_view(indices).reshape(-1) for segment in segments]
    assert torch.cat(sources).tolist() == shard.on_rank().tolist()


@PROPERTY
@given(shards())
def test_the_two_views_of_a_segment_correspond(shard: Shard) -> None:
    """A write through `live_view` is in the parameter where the loader puts it."""
    model = shard.model()
    base = base_checkpoint(model)
    live = model()
    empty = memory(live)
    index = StorageIndex(live)
    placement = LoaderDryRun(live, live.load_weights, index).trace(model.specs())
    assert memory(live) == empty
    for segment in placement["w0"].segments:
        segment.live_view().copy_(segment.source_view(base["w0"]))
    loaded = model()
    loaded.load_weights(base.items())
    assert memory(live) == memory(loaded)


def test_a_source_view_respects_the_tensors_own_offset() -> None:
    [entry] = [e for e in StorageIndex(PlainCopy()).entries if e.name == "bias"]
    segment = Segment(entry, 1, (2,), (2,), 3, (4,), True)
    memory_of_many = torch.arange(20)
    assert segment.source_view(memory_of_many[8:]).tolist() == [11, 15]


def test_a_live_view_is_the_model_itself() -> None:
    live = PlainCopy()
    [entry] = [e for e in StorageIndex(live).entries if e.name == "weight"]
    Segment(entry, 2, (4, 1), (3, 2), 0, (2, 1), True).live_view().fill_(1)
    expected = torch.full((6, 4), 7.0, dtype=torch.bfloat16)
    expected[:3, 2:] = 1
    assert (bits(live.weight) == bits(expected)).all()
