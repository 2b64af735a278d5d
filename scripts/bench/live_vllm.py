"""The measurements of `scripts.bench.apply`: a model that vLLM has loaded in this process, or one
that no engine has, and the ways to apply."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch

from engine_ext.dtypes import TORCH_DTYPE
from engine_ext.format import DecodedPart, ParamDelta, decode_part, encode_part, tensor_digest
from engine_ext.kernels import bits_of, host_bits
from engine_ext.model import StorageIndex
from engine_ext.placement import Plan, Status, TensorSpec, certify_placement, make_plan
from engine_ext.ranks import SingleRank
from engine_ext.settings import Settings
from engine_ext.startup import LoaderDryRun, compose
from engine_ext.sync import DeltaApplier, StagedPart, apply_masked

_CHUNK_BYTES: Final = 512 << 20  # vLLM's default, and ours
Timings = dict[str, float]


@dataclass(frozen=True)
class LiveModel:
    """A loaded model, with its appliers.

    Attributes:
        llm: vLLM's ``LLM``, which keeps the model alive; None if no engine has loaded it.
        base: the checkpoint's tensors.
        scatter: the applier of an engine.
        plain: the same without digests: old values are kept, but neither compared nor hashed.
    """

    llm: Any
    model: Any
    load_weights: Callable[[Any], object]
    index: StorageIndex
    base: dict[str, torch.Tensor]
    scatter: DeltaApplier
    plain: DeltaApplier

    @property
    def nbytes(self) -> int:
        return sum(entry.end - entry.start for entry in self.index.entries)

    def checksum(self) -> str:
        """Return a checksum of every bit of every parameter and buffer."""
        threads = torch.get_num_threads()
        found = [
            tensor_digest(entry.name, host_bits(bits_of(entry.flat()).cpu()), threads=threads)
            for entry in self.index.entries
        ]
        return sum(found[1:], found[0]).hex()

    def synchronize(self) -> None:
        """Wait for the device if it is not the CPU."""
        if next(self.model.parameters()).is_cuda:
            torch.cuda.synchronize()


def start(folder: Path) -> tuple[Any, Any]:
    """Load a checkpoint with vLLM as the plugin's worker does.

    Returns:
        vLLM's ``LLM``, and what the load hook learned of repacks.
    """
    from vllm import LLM

    from engine_ext.adapters.vllm import worker as adapter
    from engine_ext.adapters.vllm.postload import repack_learner

    adapter._keep_checkpoint_layout()
    with repack_learner() as learner:
        llm = LLM(
            str(folder),
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=256,
            use_tqdm_on_load=False,
            gpu_memory_utilization=0.4,
        )
    return llm, learner


def make_live_model(llm: Any, learner: Any, threads: int) -> LiveModel:
    """Trace and certify what `start` returned, and make its appliers.

    Raises:
        RuntimeError: A tensor is not certified, so that scatter cannot write it.
    """
    from engine_ext.adapters.vllm import checkpoint

    worker: Any = llm.llm_engine.model_executor.driver_worker.worker
    model, config = worker.model_runner.get_model(), worker.vllm_config
    base = dict(checkpoint.checkpoint(model, config))
    return _certified(llm, model, checkpoint.load_function(model, config), base, learner, threads)


def make_plain_model(layers: int, device: str, seed: int, threads: int) -> LiveModel:
    """Build a random model of Qwen3's shape on a device; trace and certify it.

    Raises:
        RuntimeError: A tensor is not certified.
    """
    from scripts.bench.loaded_model import checkpoint_of, load_weights, make_model

    model = make_model(layers)
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, device=device).mul_(0.02).bfloat16()
    base = {name: tensor.cpu() for name, tensor in checkpoint_of(model)}
    return _certified(None, model, lambda given: load_weights(model, given), base, None, threads)


def _certified(
    llm: Any,
    model: Any,
    load_weights: Callable[[Any], object],
    base: dict[str, torch.Tensor],
    learner: Any,
    threads: int,
) -> LiveModel:
    specs = [TensorSpec(n, tuple(t.shape), t.dtype) for n, t in base.items()]
    index = StorageIndex(model)
    placement = LoaderDryRun(model, load_weights, index).trace(specs)
    if learner is not None:
        compose(placement, learner.repacks, learner.refusals)
    known = certify_placement(placement, base.items())
    wrong = [name for name, placed in placement.items() if placed.status is not Status.EXACT]
    if wrong:
        raise RuntimeError(f"not certified: {wrong}")
    plan = make_plan(placement, SingleRank())
    undo_bytes = Settings().undo_bytes

    def applier(plan: Plan) -> DeltaApplier:
        return DeltaApplier(
            model, index, plan, undo_bytes=undo_bytes, threads=threads, certified=known
        )

    scatter = applier(plan)
    plain = applier(dataclasses.replace(plan, digested=frozenset()))
    return LiveModel(llm, model, load_weights, index, base, scatter, plain)


def random_deltas(base: dict[str, torch.Tensor], density: float, seed: int) -> list[ParamDelta]:
    """Flip the lowest bit of that share of every tensor's elements, at least one each."""
    random = np.random.default_rng(seed)
    deltas = []
    for name, tensor in base.items():
        count = max(1, round(tensor.numel() * density))
        indices = np.unique(random.integers(0, tensor.numel(), count))
        bits = host_bits(bits_of(tensor.reshape(-1)))[indices] ^ 1
        deltas.append(ParamDelta(name, "bfloat16", tuple(tensor.shape), indices, bits))
    return deltas


def as_part(deltas: Sequence[ParamDelta]) -> DecodedPart:
    """Encode a sync of one part, and decode it."""
    return decode_part(encode_part(deltas, encoding="deltas", current_version=1))


def reverse(deltas: Sequence[ParamDelta]) -> DecodedPart:
    """Return the part that leads back from `random_deltas` to the base checkpoint."""
    return as_part([msgspec.structs.replace(delta, values=delta.values ^ 1) for delta in deltas])


def scatter_apply(applier: DeltaApplier, part: DecodedPart) -> Timings:
    """Apply a decoded part on this rank; return seconds in total and of both phases."""
    start = time.perf_counter()
    staged = [applier.stage(part)]
    middle = time.perf_counter()
    commit(applier, staged)
    end = time.perf_counter()
    return {"total": end - start, "stage": middle - start, "commit": end - middle}


def commit(applier: DeltaApplier, staged: list[StagedPart]) -> Any:
    """Commit staged parts as a rank does; return the undo log."""
    applier.check_sync(staged, full=False)
    applier.check_base(staged)
    applier.agree(staged, [applier.rank_summary(staged)])
    applier.write(staged)
    return applier.finish(staged)


def ways(
    live: LiveModel, part: DecodedPart, deltas: Sequence[ParamDelta]
) -> Iterator[tuple[str, Callable[[], Timings]]]:
    """Yield the name of every way to apply the delta, with a function that times it."""

    def timed(do: Callable[[], object]) -> Timings:
        start = time.perf_counter()
        do()
        live.synchronize()
        return {"total": time.perf_counter() - start}

    def masked() -> object:
        return apply_masked(live.load_weights, live.index, part.deltas, _CHUNK_BYTES)

    yield "scatter", lambda: scatter_apply(live.plain, part)
    yield "scatter, with digest", lambda: scatter_apply(live.scatter, part)
    yield "masked", lambda: timed(masked)
    if live.llm is not None:
        patch = _own_way(live.model, deltas)
        yield "vLLM's own", lambda: timed(patch)


def _own_way(model: Any, deltas: Sequence[ParamDelta]) -> Callable[[], object]:
    from vllm.model_executor.model_loader import checkpoint_weight_patch as own

    # It takes tensors on the device, where vLLM's own transfer delivers them.
    device = next(model.parameters()).device
    patches = [
        own.CheckpointWeightPatch(
            delta.name,
            delta.shape,
            TORCH_DTYPE[delta.dtype],
            torch.from_numpy(delta.values.view(np.int16)).view(torch.bfloat16).to(device),
            torch.from_numpy(delta.indices).to(device),
        )
        for delta in deltas
    ]
    return lambda: own.load_checkpoint_weight_patches(model, patches)


class Bench:
    """The measurements.

    Args:
        model: what is changed.
        runs: of each way; the shortest counts.
        seed: of the deltas.
        step: advances the progress bar, with what is done next.

    Attributes:
        nnz: changed elements, by density; of `compare`.
    """

    def __init__(self, model: LiveModel, runs: int, seed: int, step: Callable[[str], None]) -> None:
        self.model = model
        self.nnz: dict[float, int] = {}
        self._runs, self._seed, self._step = runs, seed, step

    def compare(self, density: float) -> dict[str, Timings]:
        """Return the shortest seconds of every way, in total and by phase.

        Raises:
            RuntimeError: A way leaves other bits than a load of the changed checkpoint.
        """
        deltas = random_deltas(self.model.base, density, self._seed)
        self.nnz[density] = sum(delta.nnz for delta in deltas)
        part = as_part(deltas)
        undo = reverse(deltas)
        expected = self._loaded(deltas)
        found: dict[str, Timings] = {}
        todo = list(ways(self.model, part, deltas))
        for number in range(self._runs):
            self._step(f"applying to {density:.1%} of the elements")
            for name, apply in todo:
                times = apply()
                if number == 0 and self.model.checksum() != expected:
                    raise RuntimeError(f"{name} leaves other bits than a load at {density:.1%}")
                known = found.setdefault(name, times)
                found[name] = {phase: min(known[phase], times[phase]) for phase in times}
                scatter_apply(self.model.plain, undo)
        return found

    def _loaded(self, deltas: Sequence[ParamDelta]) -> str:
        """Return the checksum after a load of the changed tensors; load the base ones again."""
        self._step("loading the changed checkpoint")
        changed = {}
        for delta in deltas:
            tensor = self.model.base[delta.name].clone().reshape(-1)
            host_bits(bits_of(tensor))[delta.indices] = delta.values
            changed[delta.name] = tensor.reshape(delta.shape)
        with torch.no_grad():
            self.model.load_weights(iter(changed.items()))
            checksum = self.model.checksum()
            self.model.load_weights(iter(self.model.base.items()))
        return checksum
