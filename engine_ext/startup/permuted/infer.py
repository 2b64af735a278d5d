"""Infer from probes how an engine's post-load processing moves a module's elements.

The processing is a black box. It is run on copies of the module whose parameters hold the digits
of each element's index; the output names, at every place, the element that is there now. Random
bits and their complement are then moved by the map that was found and by the processing, and must
agree bit for bit. Processing that computes, clamps or sorts is refused with a reason. So is a
parameter if the processing keeps something of it elsewhere, because a write to the parameter would
not reach that.

An inferred repack is a hypothesis like any placement: `engine_ext.placement.certify` proves it on
the checkpoint's bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from engine_ext.model import extent, hash_tensor
from engine_ext.placement import Placement, Repack
from engine_ext.startup.permuted.index_probe import IndexProbe

Process = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""Run a module's processing on copies that hold these parameters, which it can write to.

Returns the parameters under the same names, and what else the processing made under other names.
"""


@dataclass(frozen=True, slots=True)
class InferredRepacks:
    """What the processing does to a module's parameters, by name, or why it cannot be followed.

    A parameter that is in neither dict is unchanged. `replaced` is whether the engine's loader
    might not know some parameter afterwards, because it is another object; `outside` is whether
    the processing writes to something that the module's copies share, so that it cannot be
    repeated.
    """

    repacks: dict[str, Repack]
    refusals: dict[str, str]
    replaced: bool = False
    outside: bool = False


def infer_repacks(parameters: Mapping[str, torch.Tensor], process: Process) -> InferredRepacks:
    """Infer how a module's processing moves the elements of its parameters.

    Never raises: if the processing fails, all parameters are refused.

    Memory: let M be the bytes of all parameters. If the processing needs M besides its input and
    output, and `process` keeps its last output, at most 6 M and 64 MiB are used besides the module:
    those four M, and an int32 map of up to 2 M on the CPU if the permutation differs between
    blocks of the leading dimension; otherwise the map is that of one block. If it would be more
    than 2 M (1-byte dtypes), the parameter is refused. The returned maps cover one block each, the
    smallest that repeats.

    Args:
        parameters: the module's parameters, contiguous. Their elements are not read or written.
        process: see `Process`; called about a dozen times, and once more per parameter if some
            are refused.
    """
    probes = {n: IndexProbe(tensor, seed) for seed, (n, tensor) in enumerate(parameters.items())}
    try:
        _run_probes(probes, process)
    except Exception as error:
        text = str(error).strip().splitlines()
        reason = f"fails on probes: {type(error).__name__}: {text[0] if text else ''}"
        for probe in probes.values():
            probe.refuse(reason)
    return InferredRepacks(
        {n: p.repack for n, p in probes.items() if p.repack is not None and not p.reason},
        {n: f"post-load processing {p.reason}" for n, p in probes.items() if p.reason},
    )


def _run_probes(probes: dict[str, IndexProbe], process: Process) -> None:
    # Functions, so that no output is kept alive while the next is made.
    def compare(flip: bool) -> dict[str, str]:
        outputs = process({name: probe.payload(flip) for name, probe in probes.items()})
        for name, probe in probes.items():
            probe.compare(outputs.get(name), flip)
        return _other_outputs(outputs, probes)

    def read_digit(number: int) -> None:
        outputs = process({name: probe.digit(number) for name, probe in probes.items()})
        for name, probe in probes.items():
            if probe.pending:
                probe.read_digit(number, outputs[name])

    def verify(flip: bool) -> None:
        outputs = process({name: probe.payload(flip) for name, probe in probes.items()})
        for name, probe in probes.items():
            if probe.pending:
                probe.verify(outputs[name], flip)

    before, after = compare(False), compare(True)
    changed = {n for n in before.keys() | after.keys() if before.get(n) != after.get(n)}
    if changed:
        _refuse_kept_elsewhere(probes, process, before, changed)
    for number in range(max((len(p.digits) for p in probes.values() if p.pending), default=0)):
        read_digit(number)
    for probe in probes.values():
        probe.conclude()
    if any(probe.pending for probe in probes.values()):
        verify(False)
        verify(True)
    _refuse_inputs_of_refused(probes, process)


def _other_outputs(
    outputs: Mapping[str, torch.Tensor], probes: Mapping[str, IndexProbe]
) -> dict[str, str]:
    """Fingerprint each tensor that the processing made in addition to the parameters."""
    return {name: hash_tensor(t) for name, t in outputs.items() if name not in probes}


def _refuse_kept_elsewhere(
    probes: dict[str, IndexProbe], process: Process, before: dict[str, str], changed: set[str]
) -> None:
    """Refuse the parameters that the other outputs in `changed` are computed from."""
    unexplained = set(changed)
    for name, probe in probes.items():
        payloads = {n: p.payload(flip=n == name) for n, p in probes.items()}
        now = _other_outputs(process(payloads), probes)
        affected = {n for n in changed if now.get(n) != before.get(n)}
        if affected:
            probe.refuse(f"also keeps values computed from it in {', '.join(sorted(affected))}")
        unexplained -= affected
    if unexplained:
        kept = ", ".join(sorted(unexplained))
        for probe in probes.values():
            probe.refuse(f"also keeps {kept}, which might be computed from it")


def _refuse_inputs_of_refused(probes: Mapping[str, IndexProbe], process: Process) -> None:
    """Refuse parameters that a refused one is computed from: a write would not update that one."""
    refused = {name for name, probe in probes.items() if probe.reason}
    if not refused or len(refused) == len(probes):
        return

    def outcome(flipped: str | None) -> dict[str, str]:
        outputs = process({n: p.payload(flip=n == flipped) for n, p in probes.items()})
        return {name: hash_tensor(outputs[name]) for name in refused if name in outputs}

    before = outcome(None)
    for name in probes.keys() - refused:
        now = outcome(name)
        changed = sorted(n for n in refused if now.get(n) != before.get(n))
        if changed:
            probes[name].refuse(f"also computes {', '.join(changed)} from it")


def compose(
    placement: Placement, repacks: Mapping[str, Repack], refusals: Mapping[str, str] | None = None
) -> None:
    """Add to a traced placement what happened to the live tensors after loading.

    Args:
        placement: as traced, not yet certified; its segments are replaced in place.
        repacks: by any name of the live tensor.
        refusals: why a live tensor cannot be followed, by any of its names; the checkpoint tensors
            in it become uncertified.
    """
    for placed in placement.values():
        for number, segment in enumerate(placed.segments):
            live = segment.live
            names = [live.name, *live.aliases]
            reasons = [refusals[n] for n in names if n in refusals] if refusals else []
            found = {id(repacks[n]): repacks[n] for n in names if n in repacks}
            if reasons:
                placed.refuse(f"{live.name}: {reasons[0]}")
            elif len(found) > 1 or any(extent(live.tensor) % r.block for r in found.values()):
                placed.refuse(f"{live.name}: the inferred repack does not fit it")
                continue
            for repack in found.values():
                both = segment.repack.then(repack) if segment.repack else repack
                placed.segments[number] = dataclasses.replace(segment, repack=both)
