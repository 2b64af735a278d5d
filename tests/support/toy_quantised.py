"""Small models that an engine quantises or packs after loading, served with rebuilds.

Each `Method` is one habit of post-load processing. `Serving` starts the ranks of an engine as an
adapter does (learn, keep, load, process, make the receivers) and compares what they serve with
models that were freshly loaded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import nn

from engine_ext.apply.delta_applier import DeltaApplier
from engine_ext.derived import Recomputation
from engine_ext.model.constants import Constants, is_constant
from engine_ext.model.module_walk import reachable_tensors
from engine_ext.rebuild import LoadingStates, make_twin
from engine_ext.receiver.loaded_model import LoadedModel, Rebuilding
from engine_ext.receiver.startup import make_receiver
from engine_ext.repacks.load_hook import Processing, RepackLearner
from engine_ext.settings import Settings
from engine_ext.tracing import LoadingTrace
from engine_ext.wire import ParamDelta
from tests.support.rank_engine import Engine, part_id
from tests.support.served_models import bits, delta_between, dense_delta, one_part, random_tensor
from tests.support.thread_group import Group, ThreadRanks
from tests.support.toy_models import Checkpoint, Weights

IN, OUT = 6, 8
SHADOW_BYTES = 1 << 20


def parameter(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def empty(*shape: int) -> nn.Parameter:
    return parameter(torch.full(shape, 7.0, dtype=torch.bfloat16))


class Method:
    """A quant method that leaves the layer as it is."""

    def create_weights(self, layer: Any) -> None:
        """Attach what the layer loads besides its weight."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Make what is served of what was loaded."""

    def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ layer.weight.float().t()


class Int8(Method):
    """Quantises by row; the new parameters have no loader."""

    def process_weights_after_loading(self, layer: Any) -> None:
        weight = layer.weight.float()
        scale = weight.nan_to_num().abs().amax(1, keepdim=True).clamp(min=1e-6) / 127
        layer.weight = parameter((weight / scale).nan_to_num().round().clamp(-127, 127).char())
        layer.weight_scale = parameter(scale)

    def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ (layer.weight.float() * layer.weight_scale).t()


class Transpose(Method):
    """Moves only, but the new parameter has no loader."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.weight = parameter(layer.weight.t().contiguous())

    def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ layer.weight.float()


class Handle:
    """An opaque kernel handle: a plain object with a function that has captured the weight."""

    def __init__(self, packed: torch.Tensor) -> None:
        self.run = lambda x: x @ packed.t()


class Packed(Method):
    """Packs the weight into a handle and removes it."""

    keeps_empty = True

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.handle = Handle(layer.weight.float())
        layer.weight = parameter(torch.empty(0)) if self.keeps_empty else None

    def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = layer.handle.run(x)
        return found


class PackedAway(Packed):
    keeps_empty = False


class ZeroPoints(Method):
    """Symmetric: the zero points are loaded and dropped."""

    def create_weights(self, layer: Any) -> None:
        layer.zeros = empty(OUT)

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.weight = parameter(layer.weight.float() * 2)
        del layer.zeros


class SecondCopy(Method):
    """Leaves the parameter, and keeps its transpose in a list."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.copies = [layer.weight.t().contiguous()]

    def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ layer.copies[0].float()


class Attribute(Method):
    """Replaces the parameter by a plain attribute."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.fast = layer.weight.float() * 3
        layer.weight = parameter(torch.empty(0))

    def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x @ layer.fast.t()
        return found


def copy_shard(live: nn.Parameter, weight: torch.Tensor, rank: int) -> None:
    """Copy the rows of a checkpoint tensor that the rank holds."""
    rows = live.shape[0]
    start = 0 if rows == weight.shape[0] else rank * rows
    live.data.copy_(weight.narrow(0, start, rows))


class Layer(nn.Module):
    """A linear layer whose rows are divided between the ranks."""

    def __init__(self, method: Method, *, bias: bool = True, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.rank = rank
        self.weight = empty(OUT // ranks, IN)
        self.weight.weight_loader = self.load  # type: ignore[attr-defined]
        if bias:
            self.bias = empty(OUT // ranks)
        self.quant_method = method
        method.create_weights(self)

    def load(self, live: nn.Parameter, weight: torch.Tensor) -> None:
        copy_shard(live, weight, self.rank)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = getattr(self, "bias", None)
        out = self.quant_method.apply(self, x)
        return out if bias is None else out + bias.float()


class Mixer(nn.Module):
    """Stores -exp of what it loads, and puts another parameter in place of one."""

    def __init__(self) -> None:
        super().__init__()
        self.A = parameter(torch.zeros(OUT))
        self.A.weight_loader = self.load_a  # type: ignore[attr-defined]
        self.D = empty(OUT)

    @staticmethod
    def load_a(live: nn.Parameter, weight: torch.Tensor) -> None:
        live.data.copy_(-torch.exp(weight.float()))


class Model(nn.Module):
    """A norm, and what a subclass builds."""

    renamed: ClassVar[Mapping[str, str]] = {}
    replaced: ClassVar[tuple[str, ...]] = ()
    constants: ClassVar[tuple[str, ...]] = ()  # parameters that dummy weights leave alone
    shapes: ClassVar[dict[str, tuple[int, ...]]] = {}

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.rank = rank
        self.norm = empty(IN)
        self.build(rank, ranks)

    def build(self, rank: int, ranks: int) -> None:
        """Attach the layers."""

    def after_processing(self) -> None:
        """What the engine does after its post-load processing."""

    def load_weights(self, weights: Weights) -> None:
        live = dict(self.named_parameters(remove_duplicate=False)) | dict(self.named_buffers())
        for name, weight in weights:
            path = self.renamed.get(name, name)
            target = live[path]
            loader = getattr(target, "weight_loader", None)
            if path in self.replaced:
                module, _, attribute = path.rpartition(".")
                setattr(self.get_submodule(module), attribute, parameter(weight))
            elif loader is not None:
                loader(target, weight)
            else:
                copy_shard(target, weight, self.rank)  # type: ignore[arg-type]

    @classmethod
    def checkpoint(cls, seed: int = 0) -> Checkpoint:
        names = {"norm": (IN,), **cls.shapes}
        return {
            name: random_tensor(shape, torch.bfloat16, seed + number)
            for number, (name, shape) in enumerate(names.items())
        }


def linear_shapes(*names: str, bias: bool = True) -> dict[str, tuple[int, ...]]:
    """The checkpoint's shapes of some layers."""
    found: dict[str, tuple[int, ...]] = {}
    for name in names:
        found[f"{name}.weight"] = (OUT, IN)
        if bias:
            found[f"{name}.bias"] = (OUT,)
    return found


def one_layer(method: Callable[[], Method]) -> type[Model]:
    """A model of one layer that is processed so."""

    class OneLayer(Model):
        shapes: ClassVar = linear_shapes("lin") | (
            {"lin.zeros": (OUT,)} if method is ZeroPoints else {}
        )

        def build(self, rank: int, ranks: int) -> None:
            self.lin = Layer(method(), rank=rank, ranks=1 if method is ZeroPoints else ranks)

    return OneLayer


class Everything(Model):
    """One layer of each habit, and a mixer."""

    shapes: ClassVar = {
        **linear_shapes("int8", "transpose", "packed", "away", "second", "attribute", "plain"),
        **linear_shapes("zeros"),
        "zeros.zeros": (OUT,),
        "mixer.A_log": (OUT,),
        "mixer.D": (OUT,),
    }
    renamed: ClassVar = {"mixer.A_log": "mixer.A"}
    replaced: ClassVar = ("mixer.D",)

    def build(self, rank: int, ranks: int) -> None:
        self.int8 = Layer(Int8(), rank=rank, ranks=ranks)
        self.transpose = Layer(Transpose(), rank=rank, ranks=ranks)
        self.packed = Layer(Packed(), rank=rank, ranks=ranks)
        self.away = Layer(PackedAway(), rank=rank, ranks=ranks)
        self.second = Layer(SecondCopy(), rank=rank, ranks=ranks)
        self.attribute = Layer(Attribute(), rank=rank, ranks=ranks)
        self.plain = Layer(Method(), rank=rank, ranks=ranks)
        self.zeros = Layer(ZeroPoints())
        self.mixer = Mixer()


# --- the engine ---


def processing(module: Any) -> Processing:
    return Processing(
        module,
        module.quant_method,
        lambda copy: copy.quant_method.process_weights_after_loading(copy),
    )


def walk(model: nn.Module, *args: Any) -> Iterator[Processing]:
    for module in model.modules():
        if isinstance(getattr(module, "quant_method", None), Method):
            yield processing(module)


def process(model: Model) -> None:
    """The engine's post-load processing."""
    for module in list(model.modules()):
        method = getattr(module, "quant_method", None)
        if isinstance(method, Method):
            method.process_weights_after_loading(module)
    model.after_processing()


def copied(checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in checkpoint.items():
        yield name, tensor.clone()


def loaded(model: type[Model], checkpoint: Checkpoint, rank: int = 0, ranks: int = 1) -> Model:
    """A model as the engine starts it without delta updates."""
    fresh = model(rank, ranks)
    with torch.no_grad():
        fresh.load_weights(copied(checkpoint))
        process(fresh)
    return fresh


def probe(module: nn.Module) -> torch.Tensor | None:
    """What a layer computes from random rows; None for other modules."""
    if not isinstance(module, Layer) or module.quant_method is None:
        return None
    rows = torch.randn(3, IN, generator=torch.Generator().manual_seed(5))
    return module.quant_method.apply(module, rows)


def served(model: nn.Module) -> dict[str, Any]:
    """All that is served: the bits of every tensor, numbers, and what the layers compute."""
    found: dict[str, Any] = {}
    for path, _, name, tensor in reachable_tensors(model):
        key = f"{path}.{name}"
        found[key] = (tuple(tensor.shape), tensor.stride(), tensor.dtype, bits(tensor).tobytes())
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, float):
                found[f"{path}.{name}"] = value
        out = probe(module)
        if out is not None:
            found[f"{path}()"] = bits(out).tobytes()
    return found


class Serving:
    """The ranks of an engine that serves a model, and the version it is at.

    Args:
        context: of `Rebuilding`.
        recomputations: of `LoadedModel`, by model.
        dummy: load random weights in place of the checkpoint.
    """

    def __init__(
        self,
        model: type[Model],
        folder: Path,
        *,
        ranks: int = 1,
        context: Callable[[], Any] = contextlib.nullcontext,
        checkpoint: Checkpoint | None = None,
        shadow_bytes: int = SHADOW_BYTES,
        dummy: bool = False,
        recomputations: Callable[[Any], Sequence[Recomputation]] = lambda model: (),
        **settings: Any,
    ) -> None:
        self.kind, self.size, self.dummy = model, ranks, dummy
        self._recomputations = recomputations
        self.base = model.checkpoint() if checkpoint is None else checkpoint
        self.version = 0
        self.current = dict(self.base)
        group = Group(ranks)
        self.states = [LoadingStates(shadow_bytes, moved_too=dummy) for _ in range(ranks)]
        loads = [self._load(rank, context, ThreadRanks(group, rank)) for rank in range(ranks)]
        self.models = [one.model for one in loads]
        self.engine = Engine([], folder)
        chosen = Settings(**{"undo_bytes": 1 << 20, "read_workers": 1, **settings})
        with ThreadPoolExecutor(ranks) as threads:
            receivers = threads.map(lambda one: make_receiver(one, chosen), loads)
            self.engine.receivers = list(receivers)

    @torch.no_grad()
    def _load(self, rank: int, context: Callable[[], Any], place: ThreadRanks) -> LoadedModel:
        model, states = self.kind(rank, self.size), self.states[rank]
        constants, loading = Constants(model), LoadingTrace()
        owner: Any = ModuleType("engine")
        owner.process = process

        def checkpoint() -> Iterable[tuple[str, torch.Tensor]]:
            return copied(self.base)

        def trace(model: nn.Module) -> None:
            twin: Any = make_twin(model, states.states)
            loading.trace(twin, twin.load_weights, None if self.dummy else checkpoint)

        if self.dummy:
            for seed, (name, one) in enumerate(model.named_parameters(), 99):
                if name not in self.kind.constants:
                    one.data.copy_(random_tensor(one.shape, one.dtype, seed))
        else:
            model.load_weights(checkpoint())
        learner = RepackLearner(
            owner, "process", walk, trace, states.keep, keep_moved=states.moved_too
        )
        with learner:
            owner.process(model)
        return LoadedModel(
            model=model,
            load_weights=model.load_weights,
            checkpoint=None if self.dummy else checkpoint,
            reload=model.load_weights,
            ranks=place,
            repacks=learner.repacks,
            refusals=learner.refusals,
            learned=learner.complete,
            constants=lambda path, tensor: is_constant(path, tensor) or constants(path, tensor),
            recomputations=self._recomputations(model),
            loading=loading,
            rebuilding=Rebuilding(
                states=states,
                loader=lambda twin: twin.load_weights,  # type: ignore[return-value]
                context=context,
                probe=probe,
            ),
        )

    def applier(self, rank: int = 0) -> DeltaApplier:
        found = self.engine.receivers[rank]._applier
        assert isinstance(found, DeltaApplier)
        return found

    def statuses(self, rank: int = 0) -> dict[str, str]:
        """The status of every checkpoint tensor."""
        return {n: p.status.value for n, p in self.applier(rank).plan.placement.items()}

    def reasons(self, rank: int = 0) -> dict[str, str]:
        """Why tensors are refused."""
        return {n: p.reason for n, p in self.applier(rank).plan.placement.items() if p.reason}

    def served(self) -> list[dict[str, Any]]:
        return [served(model) for model in self.models]

    # Steps of a sync

    def body(self, target: Checkpoint, *, full: bool = False, dense: bool = False) -> bytes:
        """One part that leads from the current checkpoint to another one."""
        deltas: list[ParamDelta] = []
        for name, new in target.items():
            if full or dense:
                deltas.append(dense_delta(name, new))
            else:
                deltas.append(delta_between(name, self.current[name], new))
        more: dict[str, Any] = {"full": True, "base_version": None} if full else {}
        return one_part(deltas, **{"current_version": self.version + 1, **more})

    def stage(self, body: bytes) -> list[dict[str, Any]]:
        """Stage and prepare as the HTTP side does, and drop what is refused."""
        answers = self.engine.stage(part_id(body), body)
        if any("error" in answer for answer in answers):
            self.engine.call("drop")
        return answers

    def sync(self, target: Checkpoint, **options: Any) -> list[dict[str, Any]]:
        """Send a sync; the answers to the commit, or those that refuse it."""
        body = self.body(target, **options)
        answers = self.stage(body)
        if any("error" in answer for answer in answers):
            return answers
        answers = self.engine.commit(part_id(body))
        if all("ok" in answer for answer in answers):
            self.version, self.current = self.version + 1, self.current | target
        return answers

    def rollback(self, checkpoint: Checkpoint) -> list[dict[str, Any]]:
        """Roll back to a version that had this checkpoint."""
        answers = self.engine.call("rollback")
        if all("ok" in answer for answer in answers):
            self.version, self.current = self.version - 1, checkpoint
        return answers

    def assert_fresh(self) -> None:
        """Every rank serves what an engine would that has loaded the current checkpoint.

        The digest that is tracked is that of a scan.
        """
        for rank, found in enumerate(self.served()):
            expected = served(loaded(self.kind, self.current, rank, self.size))
            assert found.keys() == expected.keys()
            wrong = [name for name, value in expected.items() if found[name] != value]
            assert not wrong, f"rank {rank} serves others: {wrong}"
        self.assert_digests()

    def assert_digests(self) -> None:
        """What each rank tracks is what its memory says."""
        scans = self.engine.call("digest", scan=True)
        for answer in scans:
            assert answer["ok"]["tensors"] == answer["ok"]["tracked"]


def refusal(answers: Sequence[dict[str, Any]]) -> str:
    """The first message; every rank's error says that the engine is unchanged."""
    errors = [answer["error"] for answer in answers if "error" in answer]
    assert errors, answers
    assert all(error["engine_state"] == "unchanged" for error in errors), errors
    return str(errors[0]["message"])
