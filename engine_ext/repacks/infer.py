"""Learned repacks: how an engine's post-load processing moves a module's elements.

The processing is a black box. It is run on copies of the module whose parameters hold the digits
of each element's index; what comes out names, at every place, the element that lies there now.
Random bits, and their complement, are then moved by the map that was found and by the
processing, and must agree bit for bit: what computes, clamps or sorts is refused with a reason,
and so is a parameter of which the processing keeps something elsewhere, because no write to the
parameter would reach that.

A learned move is a hypothesis like any placement: `engine_ext.placement.certify` proves it on the bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from engine_ext.model.fingerprint import fingerprint
from engine_ext.model.storage_index import extent
from engine_ext.placement.segments import Placement, Repack
from engine_ext.repacks.index_probe import IndexProbe

Process = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""Runs a module's processing on copies that hold these parameters (it may write to them).

Returns the parameters under the same names, and whatever else the processing made, under any
other names.
"""


@dataclass(frozen=True, slots=True)
class Learned:
    """What the processing does to a module's parameters; one in neither dict stays as it is.

    Attributes:
        repacks: moves, by parameter name.
        refusals: why it is no move that can be followed, by parameter name.
    """

    repacks: dict[str, Repack]
    refusals: dict[str, str]


def learn(parameters: Mapping[str, torch.Tensor], process: Process) -> Learned:
    """Find out how a module's processing moves the elements of its parameters.

    Never raises; a processing that fails is a refusal of all parameters.

    Args:
        parameters: the module's parameters, contiguous. They are not read or written: only their
            shapes, dtypes and devices count.
        process: as `Process`; called about a dozen times, and once more for each parameter where
            some are refused.

    With M the bytes of all parameters, a processing that needs M beside its input and output, and
    a `process` that keeps its last output, the memory in use beside the module is at most 6 M and
    64 MiB: those four, and a map (int32) of up to 2 M, held on the CPU, where the move is not the
    same in every block of the leading dimension; else the map is that of one block. Where it
    would be more than 2 M (1-byte dtypes), the parameter is refused. The maps that are returned
    are of one block each, the smallest that repeats.
    """
    lessons = {
        name: IndexProbe(tensor, seed) for seed, (name, tensor) in enumerate(parameters.items())
    }
    try:
        _teach(lessons, process)
    except Exception as error:
        text = str(error).strip().splitlines()
        reason = f"fails on probes: {type(error).__name__}: {text[0] if text else ''}"
        for lesson in lessons.values():
            lesson.refuse(reason)
    return Learned(
        {n: s.repack for n, s in lessons.items() if s.repack is not None and not s.reason},
        {n: f"post-load processing {s.reason}" for n, s in lessons.items() if s.reason},
    )


def _teach(lessons: dict[str, IndexProbe], process: Process) -> None:
    def payloads(flip: bool) -> dict[str, torch.Tensor]:
        return {name: lesson.payload(flip) for name, lesson in lessons.items()}

    # In functions, so that no output is held here while the next is made.
    def compare(flip: bool) -> dict[str, str]:
        outputs = process(payloads(flip))
        for name, lesson in lessons.items():
            lesson.compare(outputs.get(name), flip)
        return _beside(outputs, lessons)

    def take(number: int) -> None:
        outputs = process({name: lesson.probe(number) for name, lesson in lessons.items()})
        for name, lesson in lessons.items():
            if lesson.open:
                lesson.take(number, outputs[name])

    def verify(flip: bool) -> None:
        outputs = process(payloads(flip))
        for name, lesson in lessons.items():
            if lesson.open:
                lesson.verify(outputs[name], flip)

    before, after = compare(False), compare(True)
    changed = {n for n in before.keys() | after.keys() if before.get(n) != after.get(n)}
    if changed:
        _refuse_makers(lessons, process, before, changed)
    for number in range(max((len(s.places) for s in lessons.values() if s.open), default=0)):
        take(number)
    for lesson in lessons.values():
        lesson.conclude()
    if any(lesson.open for lesson in lessons.values()):
        verify(False)
        verify(True)
    _refuse_ingredients(lessons, process)


def _beside(
    outputs: Mapping[str, torch.Tensor], lessons: Mapping[str, IndexProbe]
) -> dict[str, str]:
    """A hash of each tensor that the processing made beside the parameters."""
    return {name: fingerprint(t) for name, t in outputs.items() if name not in lessons}


def _refuse_makers(
    lessons: dict[str, IndexProbe], process: Process, before: dict[str, str], changed: set[str]
) -> None:
    """Refuse the parameters that the tensors `changed` are made of."""
    unexplained = set(changed)
    for name, lesson in lessons.items():
        probes = {n: s.payload(flip=n == name) for n, s in lessons.items()}
        now = _beside(process(probes), lessons)
        made = {n for n in changed if now.get(n) != before.get(n)}
        if made:
            lesson.refuse(f"also keeps what it makes of it in {', '.join(sorted(made))}")
        unexplained -= made
    if unexplained:
        for lesson in lessons.values():
            lesson.refuse(
                f"keeps {', '.join(sorted(unexplained))} beside it, which may be made of it"
            )


def _refuse_ingredients(lessons: Mapping[str, IndexProbe], process: Process) -> None:
    """Refuse the parameters that another one, which is refused, is made of.

    Such a parameter may itself stay where it is, but a write to it would leave the other behind.
    """
    refused = {name for name, lesson in lessons.items() if lesson.reason}
    if not refused or len(refused) == len(lessons):
        return

    def made(flipped: str | None) -> dict[str, str]:
        outputs = process({n: s.payload(flip=n == flipped) for n, s in lessons.items()})
        return {name: fingerprint(outputs[name]) for name in refused if name in outputs}

    before = made(None)
    for name in lessons.keys() - refused:
        now = made(name)
        changed = sorted(n for n in refused if now.get(n) != before.get(n))
        if changed:
            lessons[name].refuse(f"makes {', '.join(changed)} of it too")


def compose(
    placement: Placement, repacks: Mapping[str, Repack], refusals: Mapping[str, str] | None = None
) -> None:
    """Add to a traced placement what happened to the live tensors after loading.

    Args:
        placement: as traced, not yet certified; its segments are replaced in place.
        repacks: learned moves, by any name of the live tensor.
        refusals: live tensors that cannot be followed, with the reason: what lies in them is
            marked uncertified.
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
                placed.refuse(f"{live.name}: what was learned of its repack does not fit it")
                continue
            for repack in found.values():
                both = segment.repack.then(repack) if segment.repack else repack
                placed.segments[number] = dataclasses.replace(segment, repack=both)
