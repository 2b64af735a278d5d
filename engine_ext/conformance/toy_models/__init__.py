"""Small models whose ``load_weights`` treat weights the ways that engine loaders do.

Each class is one habit. Its attributes say what the receiver must make of it: a tensor is updated
by any sync, unless it stands in `refused` (by none), in `dense_only`, or in `needs` (only by a
sync that holds these other tensors too).
"""

from __future__ import annotations

from engine_ext.conformance.toy_models.base import (
    GARBAGE,
    UNTOUCHED,
    Checkpoint,
    ToyModel,
    Weights,
    parameter,
)
from engine_ext.conformance.toy_models.changing import (
    Accumulates,
    BitsView,
    ByteHalf,
    BytesView,
    CastBefore,
    ClampsAfter,
    Narrowed,
    PackedAway,
    RepackedInPlace,
    Repeated,
    ReplacedAfterLoading,
    ThroughTemporary,
    TransformedAfterLoading,
    TransformedWhileLoading,
    Widened,
    ZeroesPaddingRow,
)
from engine_ext.conformance.toy_models.looking import (
    PairsConcatenated,
    PairsOrFailure,
    PairsTogether,
    ReadsThroughTemporary,
    ReadsValue,
    WantsAll,
)
from engine_ext.conformance.toy_models.moving import (
    Broadcast,
    ColumnShard,
    ColumnShardLast,
    FusedQkv,
    InterleavedColumns,
    MakesDict,
    PaddedVocab,
    PlainCopy,
    Replicated,
    RowByRow,
    RowShard,
    RowShardFirst,
    Skipped,
    StackedExperts,
    StackedExpertsLast,
    StridedParameter,
    Tied,
    Transposed,
    Windows,
)
from engine_ext.conformance.toy_models.other_means import (
    AssignsData,
    ForeachCopy,
    IndexPut,
    SetItem,
    SwapsParameter,
    Threaded,
)
from engine_ext.conformance.toy_models.writing_more import (
    ConstantFirst,
    DefaultsWhatIsMissing,
    FallsBackToEmbedding,
    FillsFirst,
    KeepsCopy,
    KeepsReference,
    TiedInEngine,
    TiedInPart,
    ZeroesFirst,
)

__all__ = [
    "GARBAGE",
    "UNTOUCHED",
    "Accumulates",
    "AssignsData",
    "BitsView",
    "Broadcast",
    "ByteHalf",
    "BytesView",
    "CastBefore",
    "Checkpoint",
    "ClampsAfter",
    "ColumnShard",
    "ColumnShardLast",
    "ConstantFirst",
    "DefaultsWhatIsMissing",
    "FallsBackToEmbedding",
    "FillsFirst",
    "ForeachCopy",
    "FusedQkv",
    "IndexPut",
    "InterleavedColumns",
    "KeepsCopy",
    "KeepsReference",
    "MakesDict",
    "Narrowed",
    "PackedAway",
    "PaddedVocab",
    "PairsConcatenated",
    "PairsOrFailure",
    "PairsTogether",
    "PlainCopy",
    "ReadsThroughTemporary",
    "ReadsValue",
    "RepackedInPlace",
    "Repeated",
    "ReplacedAfterLoading",
    "Replicated",
    "RowByRow",
    "RowShard",
    "RowShardFirst",
    "SetItem",
    "Skipped",
    "StackedExperts",
    "StackedExpertsLast",
    "StridedParameter",
    "SwapsParameter",
    "Threaded",
    "ThroughTemporary",
    "Tied",
    "TiedInEngine",
    "TiedInPart",
    "ToyModel",
    "TransformedAfterLoading",
    "TransformedWhileLoading",
    "Transposed",
    "WantsAll",
    "Weights",
    "Widened",
    "Windows",
    "ZeroesFirst",
    "ZeroesPaddingRow",
    "every_model",
    "parameter",
]


def every_model() -> list[type[ToyModel]]:
    """Every concrete model of this package."""
    found: list[type[ToyModel]] = []

    def walk(cls: type[ToyModel]) -> None:
        for child in cls.__subclasses__():
            found.append(child)
            walk(child)

    walk(ToyModel)
    return [cls for cls in found if "shapes" in vars(cls) and cls.__module__.startswith(__name__)]
