"""Time syncs of a large model whose trainer's tensors are on the engine's GPU.

Two trees of the product can be timed in one run, in turns: each is a process of its own, and a lock
says whose turn it is, once the engines of both are up. A stock engine's ``reload_weights`` of the
same weights is timed with them, and shows in the end whether the synced engine holds these.
``python -m scripts.gpu --timing SIZE`` runs it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import threading
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
import torch
from safetensors.torch import save_file

from delta_sender import DeltaSender
from scripts.gpu.engine import MODEL, GpuVllm, gpu_mib, on_cpu, running
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
    more: Facts = {"kv_bytes": 2 << 30, "length": 2048}
    live = GpuVllm(base, flags, delta=True, log_path=own / "live.log", **more)
    other = GpuVllm(base, flags, delta=False, log_path=own / "stock.log", **more)
    with running(live, *([other] if stock else [])) as ups:
        facts["start_s"], *rest = (up.result() for up in ups)
        facts["stock_start_s"] = rest[0] if rest else None
        facts["loading"] = _lines(live, "delta updates:", "oading took", "init engine")
        facts["stock_loading"] = _lines(other, "oading took", "init engine") if stock else []
        facts["gpu_mib"] = {"before": gpu_mib(live)}
        facts["syncs"] = []
        is_up(folder, facts["tree"]).touch()
        while not all(is_up(folder, tree).exists() for tree in trees):
            time.sleep(_POLL_S)
        for number, encoding in enumerate((*ENCODINGS, FULL)):
            with _turn(folder / "measure.lock"):
                _sync(live, weights, encoding, 100 * number, facts)
            time.sleep(_TURN_S)
        facts["gpu_mib"]["after"] = gpu_mib(live)
        with _turn(folder / "measure.lock"):
            started = time.monotonic()
            scan = live.get("/delta_digest", params={"scan": True}, timeout=120).json()
            facts["scan_s"] = round(time.monotonic() - started, 2)
            facts["corrupted"] = scan.get("corrupted")
            facts["digest_as_answered"] = scan.get("digest") == facts["syncs"][-1]["digest"]
            if stock:
                target = own / "target"
                write_checkpoint(weights, size, target)
                weights.clear()
                _reload(live, other, target, facts)


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


def _reload(live: GpuVllm, other: GpuVllm, target: Path, facts: Facts) -> None:
    """Time the stock engine's own reload of the checkpoint, and compare the two engines."""
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(target)}}
    found = []
    with Stream(other) as stream:
        for _ in range(2):
            began = time.monotonic()
            answer = other.post("/collective_rpc", json=body, timeout=180)
            ended = time.monotonic()
            gaps = stream.gaps(began - 0.5, ended + 0.5)
            wall = round(1e3 * (ended - began), 1)
            found.append({"status": answer.status_code, "wall_ms": wall, "token_gap_ms": gaps})
    facts["reload_weights"] = found
    ours, theirs = live.checksums(), other.checksums()
    wrong = sorted(name for name in theirs if ours.get(name) != theirs[name])
    facts["verdict"] = f"DIFFERS: {wrong[:6]}" if wrong else f"exact ({len(theirs)} tensors)"


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


class Stream:
    """A client that streams tokens without end; the gaps between them are what a user feels."""

    def __init__(self, engine: GpuVllm) -> None:
        self._url, self._times, self._ended = engine.url, list[float](), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Stream:
        self._thread.start()
        time.sleep(2.0)
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join(30)

    def gaps(self, start: float, end: float) -> dict[str, float]:
        """Return the median and the largest gap, in ms, of the tokens from `start` to `end`."""
        time.sleep(max(0.0, end - time.monotonic()))
        inside = [one for one in self._times if start <= one <= end]
        found = sorted(1e3 * (after - before) for before, after in pairwise(inside))
        if not found:
            return {}
        return {"median": round(found[len(found) // 2], 1), "largest": round(found[-1], 1)}

    def _run(self) -> None:
        body = {
            **{"model": MODEL, "prompt": "x" * 64, "temperature": 0, "ignore_eos": True},
            **{"max_tokens": 100 if on_cpu() else 1800, "stream": True},
        }
        while not self._ended.is_set():
            with contextlib.suppress(httpx.HTTPError):
                self._read(body)
            self._ended.wait(0.05)

    def _read(self, body: Facts) -> None:
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data:"):
                    self._times.append(time.monotonic())
                if self._ended.is_set():
                    return


@contextlib.contextmanager
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
        with contextlib.suppress(psutil.NoSuchProcess):
            times = psutil.Process(pid).cpu_times()
            spent += times.user + times.system
    return time.process_time(), spent


def _synchronize() -> None:
    if not on_cpu():
        torch.cuda.synchronize()
