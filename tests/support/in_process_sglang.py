"""Load quantised models with SGLang in one process, update them, and compare with fresh ones.

Run in SGLang's own Python, as a program; `run` does that. Everything is SGLang's, from the loader
to the quantisation, but for the kernels that ``tests/shims/sglang_amx`` stands in for, and the
HTTP side: the deltas are given to the receiver.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_ROOT = Path(__file__).parents[2]
_PATHS = (".", "server", "trainer", "tests/shims/sglang_cpu", "tests/shims/sglang_amx")
_PLAIN = (bool, int, float, str)


@dataclass(frozen=True)
class Case:
    """A model to load from the first of `folders`, and to update to the others one by one.

    Attributes:
        load_format: ``dummy`` takes the first folder by a full sync.
        inference: whether it is updated in PyTorch's inference mode.
    """

    name: str
    folders: Sequence[str]
    quantization: str | None = None
    dtype: str = "bfloat16"
    load_format: str = "auto"
    inference: bool = False


def run(python: Path, start: Path, cases: Sequence[Case], folder: Path) -> dict[str, Any]:
    """Return the results of `main` for each case, by its name.

    Args:
        python: SGLang's interpreter.
        start: an unquantised model; SGLang's scheduler starts with it.
        folder: for the files of this.
    """
    out = folder / "found.json"
    listed = json.dumps([vars(case) | {"folders": list(map(str, case.folders))} for case in cases])
    done = subprocess.run(
        [str(python), __file__, str(start), listed, str(out)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(_ROOT / path) for path in _PATHS),
            "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(folder),
            # Another version of numba would take the loops that vLLM's has compiled for stale.
            "NUMBA_CACHE_DIR": str(folder / "numba-cache"),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def main(start: str, listed: str, out: str) -> None:
    """Start SGLang's scheduler, carry out the cases and write what was found."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import PortArgs, prepare_server_args

    load_plugins()
    arguments = ["--model-path", start, "--device", "cpu", "--max-total-tokens", "512"]
    chosen = prepare_server_args([*arguments, "--dtype", "bfloat16", "--log-level", "error"])
    publish(chosen, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    scheduler = Scheduler(chosen, PortArgs.init_new(chosen))
    found: dict[str, Any] = {}
    for fields in json.loads(listed):
        case = Case(**fields)
        try:
            found[case.name] = _facts(case)
        except Exception as error:
            found[case.name] = {"error": f"{type(error).__name__}: {error}"}
    found["names in mxfp8"] = _names_in_mxfp8()
    del scheduler
    Path(out).write_text(json.dumps(found))
    os._exit(0)  # its threads do not end


def _facts(case: Case) -> dict[str, Any]:
    """Update a model step by step; return how what it serves differs from fresh models."""
    import torch

    from engine_ext import settings
    from engine_ext.adapters.sglang.scheduler import attach_receiver
    from scripts.live_engine import tiny_models

    runner = _runner(case, case.folders[0])
    attach_receiver(runner, settings.Settings(), runner.load_model)
    served = _Served(runner.delta_receiver)
    weights = [tiny_models.load_tensors(Path(folder)) for folder in case.folders]
    if case.load_format == "dummy":
        served.sync(weights[0])
    rows = served.call("plan")["tensors"]
    states = [row["status"] for row in rows]
    seen = [_state(runner.model)]
    with torch.inference_mode(case.inference):
        for old, new in itertools.pairwise(weights):
            served.sync(new, old)
            seen.append(_state(runner.model))
        corrupted = served.call("digest", scan=True)["corrupted"]
        served.call("rollback")
        rolled_back = _state(runner.model)
        refused = {row["name"] for row in rows if row["status"] in ("ignored", "uncertified")}
        try:
            served.sync({n: tensor for n, tensor in weights[-1].items() if n not in refused})
            healed = _differences(_state(runner.model), seen[-1])
        except RuntimeError as error:
            healed = [str(error)]
    fresh = _runner(dataclasses.replace(case, load_format="auto"), case.folders[-1])
    fresh.load_model()
    return {
        "states": {state: states.count(state) for state in states},
        "reasons": {row["name"]: row["reason"] for row in rows if row["reason"]},
        "methods": sorted({type(m.quant_method).__name__ for m in _quantised(runner.model)}),
        "moved": _differences(seen[0], seen[-1]),
        "wrong": _differences(seen[-1], _state(fresh.model)),
        "not rolled back": _differences(rolled_back, seen[-2]),
        "not sent again": healed,
        "corrupted": corrupted,
    }


def _names_in_mxfp8() -> list[str]:
    """Return the names that a model's loader is given when the adapter loads mxfp8 weights."""
    import torch

    from engine_ext.adapters.sglang.checkpoint import load_function

    names: list[str] = []
    model = SimpleNamespace(
        quant_config=SimpleNamespace(get_name=lambda: "mxfp8"),
        load_weights=lambda weights: names.extend(name for name, _ in weights),
    )
    config = SimpleNamespace(dtype=torch.bfloat16)
    load = load_function(SimpleNamespace(model_config=config, device="cpu"), model)
    load((name, torch.zeros(1)) for name in ("up.weight", "up.weight_scale"))
    return names


def _runner(case: Case, folder: str) -> Any:
    """Return the adapter's stand-in for SGLang's model runner; its model is not loaded yet."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.loader import get_model_loader
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    runner = SimpleNamespace(
        is_draft_worker=False,
        spec_algorithm=SpeculativeAlgorithm.NONE,
        model_config=ModelConfig(folder, dtype=case.dtype, quantization=case.quantization),
        load_config=LoadConfig(load_format=case.load_format),
        device="cpu",
        startup_weight_load=None,
    )

    def load_model() -> None:
        loader = get_model_loader(runner.load_config, runner.model_config)
        device = DeviceConfig("cpu")
        runner.model = loader.load_model(model_config=runner.model_config, device_config=device)

    runner.load_model = load_model
    return runner


class _Served:
    """A receiver, and its version."""

    def __init__(self, receiver: Any) -> None:
        self.receiver = receiver
        self.version = 0

    def call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        answer = self.receiver.handle(operation, arguments)
        if "error" in answer:
            raise RuntimeError(answer["error"]["message"])
        found: dict[str, Any] = answer["ok"]
        return found

    def sync(self, new: Mapping[str, Any], old: Mapping[str, Any] | None = None) -> None:
        """Send the difference of two checkpoints as the HTTP side does, one part per dtype.

        Without an old one, all of the new one is sent.
        """
        import msgspec

        from engine_ext.conformance.verified_file import verified_file
        from engine_ext.format import PartId, encode_part

        full = old is None
        deltas = [_delta(n, tensor, None if old is None else old[n]) for n, tensor in new.items()]
        deltas = [delta for delta in deltas if delta.nnz]
        dtypes = sorted({delta.dtype for delta in deltas})
        base, sync_id = None if full else self.version, uuid.uuid4().hex
        self.version += 1
        part, settled = {}, {"done": True}
        for number, dtype in enumerate(dtypes):
            body = encode_part(
                [delta for delta in deltas if delta.dtype == dtype],
                encoding="deltas",
                current_version=self.version,
                base_version=base,
                sync_id=sync_id,
                full=full,
                part=number,
                num_parts=len(dtypes),
            )
            identity, verified = verified_file(body)
            one = PartId(
                version=self.version,
                base_version=base,
                identity=identity,
                sync_id=sync_id,
                full=full,
                part=number,
                num_parts=len(dtypes),
            )
            part = msgspec.to_builtins(one)
            with tempfile.NamedTemporaryFile() as file:
                file.write(verified)
                file.flush()
                self.call("begin", part=part, path=file.name, now=0.0)
                while not self.call("poll", part=part)["done"]:
                    time.sleep(0.001)
            settled = self.call("prepare", part=part, keep=True)
        done = settled["done"]
        while not done:
            done = self.call("prepare", part=part)["done"]
        self.call("commit", version=self.version, sync_id=sync_id)


def _delta(name: str, new: Any, old: Any) -> Any:
    from engine_ext.dtypes import NAME_OF_TORCH
    from engine_ext.format import ParamDelta
    from engine_ext.kernels import host_bits
    from engine_ext.placement import flat_bits

    dtype, bits = NAME_OF_TORCH[new.dtype], host_bits(flat_bits(new))
    if old is None:
        return ParamDelta(name, dtype, tuple(new.shape), None, bits)
    indices = (host_bits(flat_bits(old)) != bits).nonzero()[0]
    return ParamDelta(name, dtype, tuple(new.shape), indices, bits[indices])


def _quantised(model: Any) -> list[Any]:
    return [m for m in model.modules() if getattr(m, "quant_method", None) is not None]


def _state(model: Any) -> dict[str, Any]:
    """Return the layout and a hash of every tensor of a model, and its modules' plain attributes.

    So are those of the quant methods, which take part in serving.
    """
    from engine_ext.model import hash_tensor, layout, reachable_tensors

    found: dict[str, Any] = {}
    for path, _, name, tensor in reachable_tensors(model):
        if not tensor.is_meta:
            found[f"{path}.{name}"] = f"{layout(tensor)} {hash_tensor(tensor)}"
    for path, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        for prefix, one in (("", module), ("quant_method.", method)):
            for name, value in getattr(one, "__dict__", {}).items():
                if isinstance(value, _PLAIN):
                    found[f"{path}.{prefix}{name}"] = value
    return found


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return sorted(n for n in one.keys() | other.keys() if one.get(n) != other.get(n))


if __name__ == "__main__":
    main(*sys.argv[1:])
