"""Prove one kind of model on a GPU: the rows, and what is done with each.

A live engine with delta updates takes three syncs under load. Then all weight checksums that the
engine itself computes, the texts and the log probabilities are compared with those of a stock
engine that was started on the target checkpoint. A rollback and a full sync follow.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from delta_sender import DeltaSender, SyncReport
from scripts.gpu import checkpoints
from scripts.gpu.engine import ENGINES, GpuServer, errors, gpu_mib, running, tail
from scripts.live_engine import quantised_checkpoints, tiny_models

Weights = dict[str, torch.Tensor]
Facts = dict[str, Any]

ENCODINGS: Final = ("deltas_zstd", "gap8_exp", "gap8_ulp")
_PROMPTS: Final = ("hello world", "The quick brown fox jumps over", "a reward is a number")
_EMBEDDING: Final = "model.embed_tokens.weight"
_HEAD: Final = "lm_head.weight"
_EAGER: Final = ("--enforce-eager",)
_MLA_HEADS: Final = {"qk_nope_head_dim": 128, "v_head_dim": 128}  # that prefill kernels take
_STREAMS: Final = 2  # requests that are always in flight


@dataclass(frozen=True)
class Row:
    """One kind of model, and how it is served.

    Attributes:
        title: For people.
        checkpoint: Writes the base checkpoint into a folder, and returns it.
        flags: Arguments of the engine.
        dtype: What the engine serves it in.
        changed: Share of the elements that each sync changes.
        more: Another check of the live engine after the second sync; gets it, its sender,
            the weights and the facts, to which it adds. It must end with the weights it began with.
        delta_flags: Further arguments of the engine with delta updates.
        kv_bytes: Size of its KV cache.
        environment: Further variables of both engines.
    """

    title: str
    checkpoint: Callable[[Path], Path]
    flags: tuple[str, ...] = _EAGER
    dtype: str = "bfloat16"
    changed: float = 0.02
    more: Callable[[GpuServer, DeltaSender, Weights, Facts], None] | None = None
    delta_flags: tuple[str, ...] = ()
    kv_bytes: int = 256 << 20
    environment: Mapping[str, str] = field(default_factory=dict)


def stepped(weights: Weights, seed: int, share: float = 0.02) -> Weights:
    """Return the weights after a step; at 2 % as `quantised_checkpoints.step` makes it.

    A head that is equal to the embedding stays so, as in a trainer that ties them.
    """
    if share == 0.02:
        found = quantised_checkpoints.step(weights, seed)
    else:
        generator = torch.Generator().manual_seed(seed)
        found = {name: tensor.clone() for name, tensor in weights.items()}
        for tensor in found.values():
            bits = tensor.view(-1).view(torch.int16)
            bits[torch.rand(len(bits), generator=generator) < share] ^= 1
    if {_HEAD, _EMBEDDING} <= weights.keys() and torch.equal(weights[_HEAD], weights[_EMBEDDING]):
        found[_HEAD] = found[_EMBEDDING].clone()
    return found


def observed(engine: GpuServer) -> Facts:
    """Return all that an engine shows of its weights: checksums, texts and log probabilities."""
    generated = []
    for prompt in _PROMPTS:
        answer = engine.complete(
            prompt, max_tokens=16, temperature=0.0, logprobs=1, ignore_eos=True
        )
        choice = answer["choices"][0]
        generated.append((choice["text"], choice["logprobs"]["token_logprobs"]))
    return {"weights": engine.checksums(), "generated": generated}


def compared(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Return ``exact``, or which checksums differ."""
    wrong = sorted(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n))
    return f"DIFFERS: {wrong[:6]}" if wrong else "exact"


def difference(live: Facts, fresh: Facts) -> str:
    """Return ``exact``, or what differs between two observations."""
    ours, theirs = live["weights"], fresh["weights"]
    if not theirs:
        return "nothing was compared: the engine has no checksums"
    wrong = sorted(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n))
    texts = [text for text, _ in live["generated"]] == [text for text, _ in fresh["generated"]]
    generated = live["generated"] == fresh["generated"]
    if not wrong and generated:
        return f"exact ({len(theirs)} tensors)"
    said = "equal" if generated else "log probabilities differ" if texts else "texts differ"
    return f"DIFFERS: {len(wrong)} of {len(theirs)} tensors {wrong[:6]}, generated {said}"


class Load:
    """A context manager with requests in flight; a failed one is counted.

    The first ones are answered before it returns: an eager engine compiles its own Triton kernels
    in its first steps, for which a sync would wait.

    Args:
        facts: gets ``load`` at the end.
    """

    def __init__(self, engine: GpuServer, facts: Facts) -> None:
        self._engine, self._facts, self._ended = engine, facts, threading.Event()
        self.answered = 0
        self.failed: list[str] = []
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(_STREAMS)]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()
        while self.answered < _STREAMS and not self.failed:
            time.sleep(0.02)

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self._engine.complete("x" * 64, max_tokens=128, temperature=0.7, ignore_eos=True)
                self.answered += 1
            except Exception as error:
                self.failed.append(repr(error)[:200])
                time.sleep(0.2)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._ended.set()
        for thread in self._threads:  # the last answers; an interrupted row has little time
            thread.join(60 if kind is None else 1)
        self._facts["load"] = {"answered": self.answered, "failed": self.failed[:2]}


_PHASES: Final = ("receive", "stage", "search", "stop", "vote", "commit", "pause", "total")
_TIMINGS: Final = frozenset(f"{phase}_ms" for phase in _PHASES)


def sync_facts(report: SyncReport) -> Facts:
    """Return a row's cells about a sync; times in ms."""
    timings = report.engine.get("timings_ms", {})
    return {
        "status": report.status,
        "full": report.full,
        "nnz": report.nnz,
        "wire_bytes": report.wire_bytes,
        "apply": report.engine.get("apply"),
        "skipped": report.engine.get("skipped"),
        **{k: v for k, v in timings.items() if k in _TIMINGS},
    }


def rows_of(engine: str) -> Mapping[str, Row]:
    """Return the rows of ``vllm`` or ``sglang``, in the order of their worth."""
    return SGLANG_ROWS if engine == "sglang" else ROWS


def run(name: str, folder: Path, engine: str = "vllm") -> Facts:
    """Prove one row of an engine; its checkpoints and logs go into the folder.

    Never raises, not even when it is interrupted: what was found until then is returned, with the
    ends of the engines' logs.
    """
    row, started = rows_of(engine)[name], time.monotonic()
    facts: Facts = {"row": name, "title": row.title}
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _prove(row, folder, facts, ENGINES[engine])
    except (Exception, KeyboardInterrupt) as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        facts["error"] = (
            "time ran out" if interrupted else f"{type(error).__name__}: {error}"[-1500:]
        )
        facts["logs"] = {one: tail(folder / f"{one}.log") for one in ("live", "fresh")}
    facts["seconds"] = round(time.monotonic() - started, 1)
    return facts


def _prove(row: Row, folder: Path, facts: Facts, kind: type[GpuServer]) -> None:
    base = row.checkpoint(folder / "base")
    weights = tiny_models.load_tensors(base)
    versions = [weights]
    for seed in range(1, 4):
        versions.append(stepped(versions[-1], seed, row.changed))
    target = tiny_models.save_checkpoint(base, folder / "target", versions[-1])
    start = partial(kind, environment=row.environment, kv_bytes=row.kv_bytes)
    flags = ("--dtype", row.dtype, *row.flags)
    live = start(base, (*flags, *row.delta_flags), delta=True, log_path=folder / "live.log")
    fresh = start(target, flags, delta=False, log_path=folder / "fresh.log")
    with running(live, fresh) as (live_up, fresh_up):
        try:
            facts["start_s"] = live_up.result()
        except Exception:
            facts["refused"] = errors(live)[-1500:]
            raise
        status = live.delta_status()
        facts["certification"] = status.health.certification
        facts["uncertified"] = dict(list(status.health.uncertified.items())[:3])
        facts["gpu_mib"] = [gpu_mib(live)]
        _sync(row, live, versions, facts)
        facts["fresh_start_s"] = fresh_up.result()
        facts["gpu_mib"] += [gpu_mib(live), gpu_mib(fresh)]
        now = observed(live)
        facts["verdict"] = difference(now, observed(fresh))
        _roll_back_and_seed(live, versions, now, facts)


def _sync(row: Row, live: GpuServer, versions: list[Weights], facts: Facts) -> None:
    with Load(live, facts):
        for number, encoding in enumerate(ENCODINGS, 1):
            held, at = versions[number - 1].items(), _version(live)
            with DeltaSender(live.url, held, base_version=at, encoding=encoding) as sender:
                report = sender.sync(versions[number].items())
                facts[f"sync{number}"] = {"encoding": encoding, **sync_facts(report)}
                if number == 2:
                    if row.more is not None:
                        row.more(live, sender, versions[number], facts)
                    facts["second"] = live.checksums()


def _roll_back_and_seed(live: GpuServer, versions: list[Weights], now: Facts, facts: Facts) -> None:
    second = facts.pop("second")
    answer = live.post("/delta_rollback", timeout=60).json()
    if answer.get("status") != "rolled_back":
        facts["rollback"] = json.dumps(answer)[:300]
    else:
        facts["rollback"] = compared(live.checksums(), second)
    with DeltaSender(live.url, versions[2].items(), base_version=_version(live)) as sender:
        report = sender.sync_full(versions[-1].items())
    again = observed(live)
    facts["full"] = {**sync_facts(report), "verdict": difference(again, now)}


def _version(live: GpuServer) -> int:
    return int(live.delta_status().version.number)


# What some rows do besides ------------------------------------------------------------------


def _sleep(
    level: int, live: GpuServer, sender: DeltaSender, weights: Weights, facts: Facts
) -> None:
    """Put the engine to sleep and wake it up; then it must hold the weights, or be healed."""
    buffers = live.buffer_checksums()
    slept = live.post("/sleep", params={"level": level, "mode": "keep"}, timeout=120)
    asleep = live.delta_status().health.asleep
    woken = live.post("/wake_up", timeout=120)
    facts["sleep"] = f"level {level}: {slept.status_code}, asleep {asleep}, {woken.status_code}"
    if not (slept.status_code == woken.status_code == 200 and asleep):
        raise RuntimeError(f"the engine did not sleep and wake up: {facts['sleep']}")
    # The engine's own checksums are of parameters alone.
    facts["buffers"] = compared(live.buffer_checksums(), buffers)
    moved = stepped(weights, 9)
    for name, values in (("after", moved), ("back", weights)):
        report = sender.sync(values.items())
        facts[f"sleep_{name}"] = sync_facts(report)
    live.post("/resume", timeout=60).raise_for_status()


def _keep(live: GpuServer, sender: DeltaSender, weights: Weights, facts: Facts) -> None:
    """Twenty syncs under load that keep KV entries, then one that drops them."""
    pauses = []
    at = _version(live)
    # The row's own sender is open still.
    options: Facts = {"flush_cache": False, "takeover": True}
    with DeltaSender(live.url, weights.items(), base_version=at, **options) as keeping:
        now = weights
        for seed in range(20):
            now = stepped(now, 100 + seed)
            report = keeping.sync(now.items())
            pauses.append(round(report.engine["timings_ms"]["pause_ms"], 1))
        facts["keep_pauses_ms"] = pauses
        keeping.sync(weights.items())
    live.drop_prefixes()


_PACKED_EXPERTS: Final = {  # sizes that the kernels for packed weights take
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "intermediate_size": 256,
}
_ONLINE_FP8: Final = ("--quantization", "fp8")
_SLEEPS: Final = (*_EAGER, "--enable-sleep-mode")
_GRAPHS: Final = ("--compilation-config", '{"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY"}')
# Two engines that tune Triton's kernels each for itself could add up in another order.
_UNTUNED: Final = {"VLLM_TRITON_FORCE_FIRST_CONFIG": "1"}


def _plain(title: str, kind: str, flags: tuple[str, ...] = _EAGER, **options: Any) -> Row:
    heads = _MLA_HEADS if kind == "deepseek_v3" else {}
    return Row(title, checkpoints.plain(kind, **heads), flags, **options)


def _quantised(title: str, form: str, flags: tuple[str, ...] = _EAGER, **options: Any) -> Row:
    dtype = quantised_checkpoints.serving_dtype(form)
    return Row(title, checkpoints.quantised(form), flags, dtype, **options)


def _experts(title: str, form: str) -> Row:
    write = checkpoints.quantised(form, "qwen3_moe", **_PACKED_EXPERTS)
    return Row(title, write, dtype=quantised_checkpoints.serving_dtype(form))


def _sleeping(title: str, level: int, write: Callable[[Path], Path], *flags: str) -> Row:
    # vLLM wants more of the device to be free than before it slept, whatever other engines take.
    room = 4 << 30
    return Row(title, write, (*_SLEEPS, *flags), more=partial(_sleep, level), kv_bytes=room)


# In the order of their worth. Runs are recorded by these names.
ROWS: Final[dict[str, Row]] = {
    "mla": _plain("DeepSeek-V3 (MLA)", "deepseek_v3"),
    "mla-triton": _plain(
        *("DeepSeek-V3, TRITON_MLA", "deepseek_v3"),
        (*_EAGER, "--attention-backend", "TRITON_MLA"),
    ),
    "moe-fp8-online": _plain("Qwen3-MoE online fp8", "qwen3_moe", (*_EAGER, *_ONLINE_FP8)),
    "moe-fp8-block": Row("Qwen3-MoE fp8, blocks of 128", checkpoints.fp8_block("qwen3_moe")),
    "moe-fp8-channel": _experts("Qwen3-MoE fp8, a scale per channel", "fp8_channel"),
    "moe-w4a16": _experts("Qwen3-MoE W4A16", "w4a16"),
    "moe-gptq": _experts("Qwen3-MoE GPTQ", "gptq"),
    "moe-awq": _experts("Qwen3-MoE AWQ", "awq"),
    "moe": _plain("Qwen3-MoE bf16", "qwen3_moe"),
    "fp8-block": Row("fp8, blocks of 128 (no DeepGEMM)", checkpoints.fp8_block("qwen3")),
    "fp8-channel": _quantised("fp8, a scale per channel", "fp8_channel"),
    "fp8-tensor": _quantised("fp8, a scale per tensor", "fp8_tensor"),
    "fp8-static": _quantised("fp8, static input scales", "compressed_fp8_tensor_static"),
    "fp8-online": _plain("online fp8", "qwen3", (*_EAGER, *_ONLINE_FP8)),
    "fp8-kv": _plain("fp8 KV cache", "qwen3", (*_EAGER, "--kv-cache-dtype", "fp8")),
    "w8a8": _quantised("W8A8 int8", "w8a8"),
    "w4a16": _quantised("W4A16 (compressed-tensors)", "w4a16"),
    "gptq": _quantised("GPTQ", "gptq"),
    "awq": _quantised("AWQ", "awq"),
    "gpt-oss-mxfp4": Row("gpt-oss MXFP4", checkpoints.gpt_oss_mxfp4),
    "gpt-oss-bf16": _plain("gpt-oss bf16", "gpt_oss"),
    "hybrid": _plain(
        *("Qwen3-Next", "qwen3_next"),
        (*_EAGER, "--additional-config", '{"gdn_prefill_backend":"triton"}'),
        environment=_UNTUNED,
    ),
    "hybrid-mamba": _plain("Falcon-H1", "falcon_h1", environment=_UNTUNED),
    "gemma3-vision": Row("Gemma 3 with vision", checkpoints.vision),
    "tied-with-head": Row("tied Qwen3 whose checkpoint has the head", checkpoints.tied_with_head),
    "sleep-1": _sleeping("sleep at level 1 between syncs", 1, checkpoints.plain("qwen3")),
    "sleep-2": _sleeping("sleep at level 2 between syncs", 2, checkpoints.plain("qwen3")),
    # It has buffers that no checkpoint holds.
    "sleep-2-vision": _sleeping("sleep at level 2, Gemma 3", 2, checkpoints.vision),
    # They are rebuilt, and what is kept for that on the device is lost with the weights.
    "sleep-2-w4a16": _sleeping("sleep at level 2, W4A16", 2, checkpoints.quantised("w4a16")),
    "sleep-2-moe-fp8-online": _sleeping(
        "sleep at level 2, Qwen3-MoE online fp8", 2, checkpoints.plain("qwen3_moe"), *_ONLINE_FP8
    ),
    "keep": _plain("20 syncs under load that keep KV entries", "qwen3", more=_keep),
    "lora": _plain("LoRA enabled", "qwen3", (*_EAGER, "--enable-lora", "--max-lora-rank", "8")),
    "draft-ngram": _plain(
        *("speculative decoding by n-grams", "qwen3"),
        (
            *(*_EAGER, "--speculative-config"),
            '{"method":"ngram","num_speculative_tokens":2,"prompt_lookup_max":3}',
        ),
    ),
    "dense-change": _plain("30 % changed", "qwen3", changed=0.3),
    "qwen3": _plain("Qwen3 bf16", "qwen3"),
    "graphs": _plain("Qwen3 bf16, CUDA graphs", "qwen3", _GRAPHS),
    "qwen3-compiled": _plain("Qwen3 bf16, torch.compile and graphs", "qwen3", ()),
    "compiled-moe": _plain("Qwen3-MoE bf16, torch.compile and graphs", "qwen3_moe", ()),
}

_NO_GRAPHS: Final = ("--disable-cuda-graph",)
_SGLANG_FLAGS: Final[dict[str, tuple[str, ...]]] = {
    "graphs": (),
    "fp8-online": (*_NO_GRAPHS, *_ONLINE_FP8),
    "moe-fp8-online": (*_NO_GRAPHS, *_ONLINE_FP8),
    "hybrid": (*_NO_GRAPHS, "--max-mamba-cache-size", "16"),
}
_SGLANG: Final = (
    *("qwen3", "graphs", "moe", "mla", "fp8-online", "moe-fp8-online", "fp8-block"),
    *("moe-fp8-block", "fp8-channel", "moe-fp8-channel", "fp8-tensor", "fp8-static", "w8a8"),
    *("w4a16", "moe-w4a16", "gptq", "moe-gptq", "awq", "moe-awq", "gpt-oss-mxfp4"),
    *("gpt-oss-bf16", "hybrid", "gemma3-vision", "tied-with-head", "dense-change", "keep"),
)
# The same models, in the order of their worth for SGLang, with its flags.
SGLANG_ROWS: Final[dict[str, Row]] = {
    name: replace(ROWS[name], flags=_SGLANG_FLAGS.get(name, _NO_GRAPHS)) for name in _SGLANG
}
