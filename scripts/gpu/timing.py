"""Time syncs of a large model whose trainer's tensors are on the engine's GPU.

Two trees of the product can be timed in one run, in turns: each is a process of its own, and a lock
says whose turn it is, once the engines of both are up; these start one after another. A stock
engine's own ways to take the same weights are timed with them (`own_ways`); its reload shows
whether the synced engine holds these.
``python -m scripts.gpu --timing SIZE`` runs it.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import torch
from safetensors.torch import save_file

from delta_sender import DeltaSender
from scripts.gpu import own_ways
from scripts.gpu.engine import GpuVllm, gpu_mib, on_cpu, running, tail
from scripts.gpu.stream import Stream
from scripts.live_engine import tiny_models

Weights = dict[str, torch.Tensor]
Facts = dict[str, Any]

ENCODINGS: Final = ("deltas_zstd", "gap8_exp", "gap8_ulp", "auto")
FULL: Final = "full"  # a sync of all weights
_SYNCS: Final = 2  # of each encoding; the first one of a sender takes longer
_DENSITY: Final = 0.02
_CHUNK: Final = 1 << 26  # elements that change at a time
_FILES: Final = 8  # of a checkpoint, written side by side
_GRAPHS: Final = (
    "--compilation-config",
    '{"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY","cudagraph_capture_sizes":[1,2,4]}',
)
_POLL_S: Final = 0.1
_TURN_S: Final = 0.5  # in which the other tree can take its turn
_UP_S: Final = 300  # for which a tree waits for the other's engines


@dataclass(frozen=True)
class Size:
    """Sizes of a Qwen3."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the checkpoint's tensors."""
        hidden, inner = self.hidden, self.intermediate
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocabulary, hidden)
        for layer in range(self.layers):
            of_layer: dict[str, tuple[int, ...]] = {
                "self_attn.q_proj": (wide, hidden),
                "self_attn.k_proj": (narrow, hidden),
                "self_attn.v_proj": (narrow, hidden),
                "self_attn.o_proj": (hidden, wide),
                "mlp.gate_proj": (inner, hidden),
                "mlp.up_proj": (inner, hidden),
                "mlp.down_proj": (hidden, inner),
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
                "self_attn.q_norm": (self.head_dim,),
                "self_attn.k_norm": (self.head_dim,),
            }
            for name, shape in of_layer.items():
                yield f"model.layers.{layer}.{name}.weight", shape
        yield "model.norm.weight", (hidden,)
        if not self.tied:
            yield "lm_head.weight", (self.vocabulary, hidden)

    def config(self) -> Facts:
        """Return the ``config.json``."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "hidden_act": "silu",
            "attention_bias": False,
            "torch_dtype": "bfloat16",
            "eos_token_id": 0,
        }


SIZES: Final = {
    "4b": Size(2560, 36, 9728, 32, 8, 128, 151936, True),
    "8b": Size(4096, 36, 12288, 32, 8, 128, 151936, False),
    "0.2b": Size(1024, 8, 3072, 16, 8, 64, 65536, True),
    "tiny": Size(256, 2, 512, 4, 2, 64, 512, False),
}


def run(size: str, folder: Path, name: str, *, stock: bool, trees: Collection[str]) -> Facts:
    """Time one tree of the product; never raises.

    Args:
        size: of `SIZES`.
        folder: shared by the trees of a run; in memory, such as ``/dev/shm``.
        name: of the tree.
        stock: whether a stock engine runs next to it.
        trees: the names of all trees of the run; nothing is measured before `is_up` has a file of
            each, which its process makes, or whoever has seen that end.
    """
    facts: Facts = {"tree": name, "model": size}
    started = time.monotonic()
    own = folder / name
    own.mkdir(parents=True, exist_ok=True)
    try:
        _time(SIZES[size], folder, own, facts, stock=stock, trees=trees)
    except (Exception, KeyboardInterrupt) as error:
        facts["error"] = f"{type(error).__name__}: {error}"[-1500:]
    if not facts.keys().isdisjoint(("error", "stock_error")):
        facts["logs"] = {log.stem: tail(log) for log in sorted(own.glob("*.log"))}
    facts["seconds"] = round(time.monotonic() - started, 1)
    return facts


def is_up(folder: Path, tree: str) -> Path:
    """Return the file that is there once the engines of a tree are up, or will not be."""
    return folder / f"up-{tree}"


def _time(
    size: Size, folder: Path, own: Path, facts: Facts, *, stock: bool, trees: Collection[str]
) -> None:
    device = "cpu" if on_cpu() else "cuda"
    weights = random_weights(size, torch.device(device))
    facts["weights"] = sum(tensor.numel() for tensor in weights.values())
    base = folder / f"checkpoint-{facts['model']}"
    with _turn(folder / "base.lock"):
        if not (base / "config.json").exists():
            write_checkpoint(weights, size, base)
    flags = ("--dtype", "bfloat16", *(("--enforce-eager",) if on_cpu() else _GRAPHS))
    with ExitStack() as stack:

        def up(name: str) -> tuple[GpuVllm, float]:
            return stack.enter_context(_started(name, base, own, flags))

        live, facts["start_s"] = up("live")
        facts["loading"] = _lines(
            live, "delta updates:", "Triton kernels", "oading took", "init engine"
        )
        other, facts["stock_start_s"] = None, None
        if stock:
            try:
                other, facts["stock_start_s"] = up("stock")
                facts["stock_loading"] = _lines(other, "oading took", "init engine")
            except Exception as error:  # the figures of the live engine stay
                facts["stock_error"] = f"{type(error).__name__}: {error}"[-1500:]
        facts["gpu_mib"] = {"before": gpu_mib(live)}
        facts["syncs"] = []
        is_up(folder, facts["tree"]).touch()
        deadline = time.monotonic() + _UP_S
        while not all(is_up(folder, tree).exists() for tree in trees):
            if time.monotonic() > deadline:
                facts["alone"] = True  # the other tree's engines can still be starting
                break
            time.sleep(_POLL_S)
        with _turn(folder / "measure.lock"):
            facts["read_both_ms"] = _read_both(weights)
            facts["kernels_tried_s"] = _try_kernels(torch.device(device))
        for number, encoding in enumerate(ENCODINGS):
            with _turn(folder / "measure.lock"):
                _sync(live, weights, encoding, 100 * number, facts)
            time.sleep(_TURN_S)
        facts["gpu_mib"]["after"] = gpu_mib(live)
        with _turn(folder / "measure.lock"):
            _scan(live, facts)
            if other is not None:
                target = own / "target"
                write_checkpoint(weights, size, target)
                with Stream(other):
                    facts["gpu_mib"]["stock"] = gpu_mib(other)
                facts["own_ways"] = own_ways.time_files(other, target, _DENSITY)
                facts["verdict"] = _difference(live, other)
                if not on_cpu():
                    facts["own_ways"] += own_ways.time_ipc(other, weights)
        time.sleep(_TURN_S)
        with _turn(folder / "measure.lock"):  # last: these take the longest
            _sync(live, weights, FULL, 100 * len(ENCODINGS), facts)
            _scan(live, facts)


def _scan(live: GpuVllm, facts: Facts) -> None:
    """Note whether the weights have the digest that the last sync answered."""
    started = time.monotonic()
    scan = live.get("/delta_digest", params={"scan": True}, timeout=120).json()
    facts["scan_s"] = round(time.monotonic() - started, 2)
    facts["corrupted"] = [*facts.get("corrupted", ()), *scan["corrupted"]]
    equal = scan["digest"] == facts["syncs"][-1]["digest"]
    facts["digest_as_answered"] = equal and facts.get("digest_as_answered", True)


def _difference(live: GpuVllm, other: GpuVllm) -> str:
    ours, theirs = live.checksums(), other.checksums()
    wrong = sorted(name for name in theirs if ours.get(name) != theirs[name])
    return f"DIFFERS: {wrong[:6]}" if wrong else f"exact ({len(theirs)} tensors)"


@contextmanager
def _started(
    name: str, base: Path, own: Path, flags: Sequence[str]
) -> Iterator[tuple[GpuVllm, float]]:
    """Run the engine ``live`` or ``stock``; yield it, and the seconds that its start has taken.

    Nothing else starts meanwhile, in any tree, and no kernel is compiled yet.
    """
    is_stock = name == "stock"
    environment = {"TRITON_CACHE_DIR": str(own / f"triton-{name}")}
    engine = GpuVllm(
        base,
        (*flags, *(own_ways.flags() if is_stock else ())),
        delta=not is_stock,
        log_path=own / f"{name}.log",
        kv_bytes=2 << 30,
        length=2048,
        environment={**environment, **(own_ways.ENVIRONMENT if is_stock else {})},
    )
    with ExitStack() as stack:
        with _turn(own.parent / "start.lock"):
            [up] = stack.enter_context(running(engine))
            seconds = up.result()
        yield engine, seconds


def _read_both(weights: Weights) -> float:
    """Return the milliseconds in which PyTorch reads all weights twice; the fastest of three."""
    found = []
    for _ in range(3):
        _synchronize()
        began = time.perf_counter()
        for _ in range(2):
            for tensor in weights.values():
                tensor.view(torch.int16).amax()
        _synchronize()
        found.append(1e3 * (time.perf_counter() - began))
    return round(min(found), 2)


def _try_kernels(device: torch.device) -> float | None:
    """Compile and try the sender's kernels; return the seconds, or None if the tree has none."""
    try:
        from engine_ext.kernels.triton import runs_change_kernels
    except ImportError:
        return None
    began = time.monotonic()
    runs_change_kernels(device)
    return round(time.monotonic() - began, 2)


def _sync(live: GpuVllm, weights: Weights, encoding: str, seed: int, facts: Facts) -> None:
    """Time the syncs of one encoding, or full ones, under a client that streams tokens."""
    at = int(live.delta_status().version.number)
    started = time.monotonic()
    sent_as = "auto" if encoding == FULL else encoding
    sender = DeltaSender(live.url, weights.items(), base_version=at, encoding=sent_as)
    send = sender.sync_full if encoding == FULL else sender.sync
    made_s = time.monotonic() - started
    with sender, Stream(live) as stream:
        for number in range(_SYNCS):
            step(weights, seed + number)
            _synchronize()
            cpu, began = _cpu_seconds(live), time.monotonic()
            report = send(weights.items())
            ended = time.monotonic()
            spent = _cpu_seconds(live)
            timings = report.engine.get("timings_ms", {})
            facts["syncs"].append(
                {
                    "encoding": encoding,
                    "number": number + 1,
                    "status": report.status,
                    "full": report.full,
                    "density": report.density,
                    "picked": report.picked,
                    "link_bytes_per_s": report.link_bytes_per_s,
                    "wire_bytes": report.wire_bytes,
                    "parts": report.parts,
                    "wall_ms": round(1e3 * (ended - began), 1),
                    "encode_ms": round(report.encode_ms, 1),
                    "post_ms": round(report.post_ms, 1),
                    "sender_cpu_s": round(spent[0] - cpu[0], 2),
                    "engine_cpu_s": round(spent[1] - cpu[1], 2),
                    "sender_made_s": round(made_s, 2),
                    "token_gap_ms": stream.gaps(began - 0.5, ended + 0.5),
                    "timings_ms": timings,
                    "digest": report.engine.get("digest"),
                    "gpu_mib": gpu_mib(live),
                }
            )


def random_weights(size: Size, device: torch.device) -> Weights:
    """Return bf16 weights, the same every time on one kind of device."""
    torch.manual_seed(0)
    return {
        name: (
            torch.ones(shape, device=device)
            if "norm" in name
            else torch.empty(shape, device=device).normal_(0, 0.02)
        ).to(torch.bfloat16)
        for name, shape in size.shapes()
    }


def step(weights: Weights, seed: int, density: float = _DENSITY) -> None:
    """Move that share of the elements of bf16 tensors by 1 to 3 units in the last place."""
    device = next(iter(weights.values())).device
    random = torch.Generator(device).manual_seed(seed)
    for tensor in weights.values():
        bits = tensor.view(torch.int16).view(-1)
        for start in range(0, bits.numel(), _CHUNK):
            chunk = bits[start : start + _CHUNK]
            chosen = torch.rand(chunk.shape, generator=random, device=device) < density
            moves = torch.randint(
                *(1, 4, chunk.shape), generator=random, device=device, dtype=torch.int16
            )
            chunk ^= moves * chosen


def write_checkpoint(weights: Weights, size: Size, folder: Path) -> None:
    """Write a checkpoint in several files; its config comes last."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny_models.build_tokenizer().save_pretrained(folder)
    names = [*weights]
    each = -(-len(names) // _FILES)
    groups = [names[at : at + each] for at in range(0, len(names), each)]
    files = {f"model-{n:05}-of-{len(groups):05}.safetensors": g for n, g in enumerate(groups, 1)}

    def one(file: str) -> None:
        tensors = {name: weights[name].cpu() for name in files[file]}
        save_file(tensors, folder / file, metadata={"format": "pt"})

    with ThreadPoolExecutor(_FILES) as pool:
        [*pool.map(one, files)]
    places = {name: file for file, group in files.items() for name in group}
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(size.config()))


@contextmanager
def _turn(lock: Path) -> Iterator[None]:
    """Wait until no other tree of this run is measured."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _lines(engine: GpuVllm, *words: str) -> list[str]:
    lines = engine.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line.strip()[-220:] for line in lines if any(word in line for word in words)][:20]


def _cpu_seconds(engine: GpuVllm) -> tuple[float, float]:
    """Return the processor time of this process, and of the engine's processes."""
    spent = 0.0
    for pid in engine.pids():
        with suppress(psutil.NoSuchProcess):
            times = psutil.Process(pid).cpu_times()
            spent += times.user + times.system
    return time.process_time(), spent


def _synchronize() -> None:
    if not on_cpu():
        torch.cuda.synchronize()
