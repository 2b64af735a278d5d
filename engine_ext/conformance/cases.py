"""The ways in which a loader is known to treat a weight; one row of the table each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final

from engine_ext.conformance import models, quantised, sharded, toy_models
from engine_ext.conformance.judge import TORN, WRONG, Verdict, judge, worst
from engine_ext.conformance.subject import SubjectFactory
from engine_ext.conformance.syncs import Group, Setup, Sync, syncs_of

_WORDS: Final = {WRONG: "**wrong**", TORN: "**torn**"}
_GROUPS: Final[tuple[Group, ...]] = ("sparse", "dense", "alone", "NaN")


@dataclass(frozen=True, slots=True)
class Case:
    """One treatment.

    Attributes:
        name: for people.
        what: one line.
        setups: models that treat weights so.
        carried: this project's receivers through which sparse numbers are exact. That is asserted,
            so that they cannot pass by refusing everything.
    """

    name: str
    what: str
    setups: tuple[Setup, ...]
    carried: tuple[str, ...]

    def runs(self) -> Iterable[tuple[Setup, Sync]]:
        """Every model with every sync."""
        return [(setup, sync) for setup in self.setups for sync in syncs_of(setup)]


def _case(
    name: str,
    what: str,
    *setups: type[toy_models.ToyModel] | Setup,
    carried: tuple[str, ...] = (),
) -> Case:
    return Case(name, what, tuple(s if isinstance(s, tuple) else (s,) for s in setups), carried)


_carried = partial(_case, carried=("scatter", "masked"))
# Modules that are computed from the checkpoint are rebuilt.
_rebuilt = partial(_case, carried=("scatter",))


CASES: Final = (
    # Moves only.
    _carried(
        "plain copy",
        "one parameter per tensor",
        toy_models.PlainCopy,
        toy_models.RowByRow,
        toy_models.MakesDict,
    ),
    _carried("other floats", "fp16 and fp32 weights", models.OtherFloats),
    _rebuilt("weights without NaN", "fp8 and integer weights", models.ManyDtypes),
    _carried(
        "row shard",
        "cut along the output, 2 ranks, even and uneven",
        (toy_models.RowShardFirst, toy_models.RowShard),
        (sharded.UnevenRows, sharded.UnevenRowsLast),
    ),
    _carried(
        "column shard",
        "cut along the input, bias on both of 2 ranks",
        (toy_models.ColumnShard, toy_models.ColumnShardLast),
    ),
    _carried("fused qkv", "three tensors in one parameter", toy_models.FusedQkv),
    _carried(
        "shared kv heads",
        "q cut, k and v on both of 2 ranks",
        (sharded.SharedHeads, sharded.SharedHeadsLast),
    ),
    _carried(
        "stacked experts",
        "per-expert tensors in two 3-d parameters, 2 ranks",
        (toy_models.StackedExperts, toy_models.StackedExpertsLast),
    ),
    _carried(
        "not on this rank",
        "experts, or layers, on one of 2 ranks",
        (sharded.ExpertsByRank, sharded.ExpertsByRankLast),
        (sharded.LayersByRank, sharded.LayersByRankLast),
    ),
    _carried("interleaved columns", "two tensors share every row", toy_models.InterleavedColumns),
    _carried("transposed", "a transposed view is copied", toy_models.Transposed),
    _carried("strided parameter", "the parameter has gaps in memory", toy_models.StridedParameter),
    _carried(
        "padded vocabulary",
        "padding rows are filled, 2 ranks",
        (sharded.VocabShard, sharded.VocabShardLast),
    ),
    _carried("tied in the checkpoint", "the head is the embedding", toy_models.Tied),
    _carried("broadcast", "one element to many places, by strides", toy_models.Broadcast),
    _rebuilt("in two parameters", "one tensor is copied twice", toy_models.Replicated),
    _rebuilt("`__setitem__`", "`param[...] = weight`", toy_models.SetItem),
    _carried("permute and clone", "`contiguous` before the copy", models.PermutedAndCloned),
    _rebuilt("through a temporary", "copied to other memory first", toy_models.ThroughTemporary),
    _rebuilt("repeated heads", "`repeat_interleave` before the copy", toy_models.Repeated),
    # Two tensors or more.
    _carried("pair, copied together", "nothing until both are there", toy_models.PairsTogether),
    _rebuilt("pair, concatenated", "`cat`, then one copy", toy_models.PairsConcatenated),
    _rebuilt(
        "all or failure",
        "raises when a tensor is missing",
        toy_models.WantsAll,
        toy_models.PairsOrFailure,
        (sharded.FailsOnLastRank, sharded.FailsOnLastRankLast),
    ),
    _rebuilt(
        "default for what is missing",
        "zeros, or the embedding",
        toy_models.DefaultsWhatIsMissing,
        toy_models.FallsBackToEmbedding,
    ),
    _case(
        "cleared first",
        "the fused parameter is zeroed with the first shard",
        toy_models.ZeroesFirst,
        toy_models.FillsFirst,
        toy_models.ConstantFirst,
    ),
    _case(
        "tied by the engine only",
        "the checkpoint holds both, and they come to differ",
        toy_models.TiedInEngine,
        toy_models.TiedInPart,
    ),
    # Other ways to write.
    _rebuilt("`index_put_`", "`param[rows] = weight`", toy_models.IndexPut),
    _rebuilt("`_foreach_copy_`", "many copies in one call", toy_models.ForeachCopy),
    _case("`param.data =`", "the memory is swapped", toy_models.AssignsData),
    _rebuilt("parameter replaced", "a new `nn.Parameter`", toy_models.SwapsParameter),
    _rebuilt("thread pool", "other threads copy", toy_models.Threaded, models.ThreadPoolLoader),
    # Values that change.
    _rebuilt("cast, widened", "bf16 to fp32", toy_models.Widened),
    _rebuilt("cast, narrowed", "fp32 to bf16", toy_models.Narrowed),
    _case("cast and back", "a wider temporary", toy_models.CastBefore),
    _rebuilt(
        "copied as bits",
        "as integers or bytes",
        toy_models.BitsView,
        toy_models.BytesView,
        toy_models.ByteHalf,
    ),
    _rebuilt(
        "computed while loading", "Mamba's `A`, before the copy", toy_models.TransformedWhileLoading
    ),
    _rebuilt(
        "two-stage transform",
        "Mamba's `A`, in place after the copy",
        toy_models.TransformedAfterLoading,
    ),
    _case(
        "arithmetic in place",
        "added, clamped, scaled in live memory",
        toy_models.Accumulates,
        toy_models.ClampsAfter,
        models.ScaledRows,
        models.ScaledAfterLoading,
    ),
    _rebuilt("checkpoint tensor changed", "before it is copied", toy_models.ZeroesPaddingRow),
    _case("value read", "`weight.item()`", toy_models.ReadsValue, toy_models.ReadsThroughTemporary),
    # After loading.
    _rebuilt(
        "repacked in place",
        "same storage, same shape",
        toy_models.RepackedInPlace,
        models.RepackedExperts,
    ),
    _rebuilt(
        "repacked elsewhere", "a transposed parameter in its place", toy_models.ReplacedAfterLoading
    ),
    _rebuilt("padded after loading", "a larger parameter in its place", models.PaddedAfterLoading),
    _rebuilt("padding set after loading", "to -inf", toy_models.PaddedVocab),
    _case(
        "packed away",
        "an empty tensor is left",
        toy_models.PackedAway,
        models.PackedIntoHandle,
    ),
    _case(
        "loader replaced",
        "by one that does nothing, on a packed parameter",
        models.LoaderReplaced,
        models.HalfReplaced,
    ),
    _case(
        "no parameter",
        "the loader fills, or makes, memory of a handle or a list",
        models.LoadedIntoHandle,
        models.LoadedIntoList,
        models.MadeInHandle,
        models.MadeInDict,
    ),
    _case(
        "derived copy",
        "computed from the weight and kept",
        models.DerivedBeside,
        models.DerivedWhileLoading,
        toy_models.KeepsReference,
        toy_models.KeepsCopy,
    ),
    _carried(
        "derived, with its function",
        "recomputed by the engine's own function",
        models.DerivedRecomputed,
        models.DerivedInPlace,
    ),
    _carried("views", "of the weight, a parameter among them", models.ViewBeside),
    # Quantised, online or in the checkpoint.
    _rebuilt("fp8, online", "one scale per output", quantised.OnlineFp8PerChannel),
    _rebuilt(
        "fp8, online, one scale",
        "of the whole weight, or of each of 2 ranks' rows",
        quantised.OnlineFp8PerTensor,
        (quantised.OnlineFp8Rows, quantised.OnlineFp8RowsLast),
    ),
    _rebuilt("int8, online", "one scale per output", quantised.OnlineInt8),
    _rebuilt(
        "fp8 with one scale", "of each shard; requantised to the largest", quantised.Fp8PerTensor
    ),
    _rebuilt("fp8 with a scale per output", "transposed", quantised.Fp8PerChannel),
    _rebuilt("fp8 with a scale per block", "the scales' layout changes", quantised.Fp8Block),
    _rebuilt(
        "fp8 per block, requantised",
        "the scales become powers of two",
        quantised.Fp8BlockRequantised,
    ),
    _rebuilt("int8 with a scale per output", "W8A8: transposed, summed up", quantised.Int8),
    _rebuilt("AWQ", "int4, put in order and packed otherwise", quantised.Awq),
    _rebuilt("GPTQ", "int4, zero points off by one, `g_idx` dropped", quantised.Gptq),
    _rebuilt("W4A16", "int4, packed otherwise, `weight_shape` dropped", quantised.W4A16),
    _rebuilt(
        "MXFP4",
        "decoded to bf16, or put in the order of tiles",
        quantised.Mxfp4,
        quantised.Mxfp4Shuffled,
    ),
    _rebuilt("NVFP4", "scales shuffled, global ones multiplied and inverted", quantised.Nvfp4),
    _rebuilt("opaque handle", "packed, with an output that shows the weights", quantised.Handle),
    # Not all of it.
    _case("ignored", "the loader skips it", toy_models.Skipped),
    _case("truncated", "the engine drops rows", models.Truncated),
    _case("overlapping windows", "`unfold`", toy_models.Windows),
    _case(
        "overlapping shards",
        "2 ranks share some rows",
        (sharded.OverlappingRows, sharded.OverlappingRowsLast),
    ),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One sync on one model, judged."""

    setup: Setup
    sync: Sync
    verdict: Verdict


def run_case(case: Case, make: SubjectFactory) -> list[Run]:
    """Judge everything of a case."""
    return [Run(setup, sync, judge(setup, sync, make)) for setup, sync in case.runs()]


def cell(runs: Iterable[Run]) -> str:
    """The text of a case in the table: the worst outcome of the sparse syncs, then other outcomes.

    "alone" are the syncs that hold one tensor of several, "dense" those with params that are sent
    whole, "NaN" those with new values that are NaN.
    """
    found: dict[Group, list[str]] = {}
    for run in runs:
        found.setdefault(run.sync.group, []).append(run.verdict.outcome)
    words = {group: worst(found[group]) for group in _GROUPS if group in found}
    main = words["sparse"]
    others = [f"{g} {_word(w)}" for g, w in words.items() if w != main]
    return ", ".join([_word(main), *others])


def _word(outcome: str) -> str:
    return _WORDS.get(outcome, outcome)
