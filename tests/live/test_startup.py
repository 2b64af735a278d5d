"""A server with --enable-delta-updates has them or does not start; others have nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.live_engine.process import EngineError, EngineProcess
from tests.live.programs import python

pytestmark = pytest.mark.versions

ENABLE = "--enable-delta-updates"
FLAGS = [
    ENABLE,
    "--delta-base-version",
    "--delta-keep-plain",
    "--delta-root",
    "--delta-log",
    "--delta-follow",
    "--delta-api-key",
    "--delta-allow-from",
    "--delta-scrub-interval",
    "--delta-max-pause",
    "--delta-undo-bytes",
    "--delta-shadow-bytes",
    "--delta-tuning",
]
EXAMPLE_CONNECTOR = '{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}'
ENDPOINTS = [
    ("POST", "/update_weights_delta"),
    ("POST", "/delta_rollback"),
    ("POST", "/delta_catch_up"),
    ("POST", "/delta_pin"),
    ("GET", "/delta_status"),
    ("GET", "/delta_digest"),
]


@pytest.mark.parametrize(
    ("engine", "command"),
    [
        ("vllm", ["-m", "vllm.entrypoints.openai.api_server", "--help=delta"]),
        ("sglang", ["-m", "sglang.launch_server", "--help"]),
    ],
)
def test_the_flags_stand_in_the_engines_help(engine: str, command: list[str]) -> None:
    shown = python(engine, *command)
    assert [flag for flag in FLAGS if flag not in shown.stdout] == [], shown.stderr[-2000:]


@pytest.mark.parametrize(
    ("kind", "more"),
    # SGLang has that route itself; asked for a format that it does not know, it exits.
    [("vllm", [("POST", "/update_weights_from_disk")]), ("sglang", [])],
    ids=["vllm", "sglang"],
)
def test_without_the_flag_there_is_nothing(
    kind: str,
    more: list[tuple[str, str]],
    checkpoint: Callable[[str], Path],
    start: Callable[..., EngineProcess],
) -> None:
    engine = start(kind, checkpoint("qwen3"), enable_delta=False)
    for method, path in [*ENDPOINTS, *more]:
        assert (engine.get if method == "GET" else engine.post)(path).status_code == 404
    if kind == "vllm":
        rpc = engine.post("/collective_rpc", json={"method": "delta_updates"})
        assert rpc.status_code == 500
    engine.stop()


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ([], {"VLLM_PLUGINS": "another"}, "unrecognized arguments: --enable-delta-updates"),
        pytest.param(
            ["--enable-eplb"],
            {},
            "does not work with --enable-eplb",
            marks=pytest.mark.full,
        ),
        (
            ["--kv-transfer-config", EXAMPLE_CONNECTOR],
            {},
            "(ExampleConnector) yet: it keeps KV of old weights",
        ),
    ],
    ids=["plugin-not-loaded", "moving-experts", "kv-connector"],
)
def test_vllm_refuses_to_start(
    checkpoint: Callable[[str], Path],
    start: Callable[..., EngineProcess],
    arguments: list[str],
    environment: dict[str, str],
    message: str,
) -> None:
    with pytest.raises(EngineError) as failed:
        start("vllm", checkpoint("qwen3"), extra_args=arguments, extra_env=environment)
    assert "exited with code" in str(failed.value)
    log = Path(str(failed.value).split("end of ")[1].split(":\n")[0]).read_text()
    assert message in log


DELTAS = "--enable-delta-updates"
LMCACHE = ("--kv-offloading-size", "1", "--kv-offloading-backend", "lmcache")
PRODUCER = '{"kv_connector": "NixlConnector", "kv_role": "kv_producer"}'
REPLICAS = (DELTAS, "--data-parallel-size", "2")


def parsed_by_vllm(*arguments: str) -> Any:
    """Return a command line as vLLM's own parser parses it, without starting a process."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", "m", *arguments])
    return AsyncEngineArgs.from_cli_args(args)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*REPLICAS, "--data-parallel-external-lb"], "start them as separate engines"),
        ([DELTAS, "--nnodes", "2", "--enable-lora"], "several hosts"),
        (
            [DELTAS, "--compilation-config", '{"inductor_compile_config": {"freezing": true}}'],
            "inductor's freezing",
        ),
        (["--delta-tuning", "read-workers=2"], "needs --enable-delta-updates"),
        *(
            pytest.param(arguments, message, marks=pytest.mark.full)
            for arguments, message in (
                ([*REPLICAS, "--data-parallel-hybrid-lb"], "start them as separate engines"),
                ([*REPLICAS, "--data-parallel-rank", "1"], "start them as separate engines"),
                ([*REPLICAS, "--data-parallel-size-local", "1"], "--data-parallel-size-local"),
                ([*REPLICAS, "--data-parallel-backend", "ray"], "--data-parallel-backend"),
                ([*REPLICAS, "--api-server-count", "2"], "add --api-server-count 1"),
                ([DELTAS, "--enable-eplb"], "--enable-eplb"),
                ([DELTAS, "--enable-elastic-ep"], "--enable-elastic-ep"),
                ([DELTAS, "--headless"], "--headless"),
                (
                    [DELTAS, "--distributed-executor-backend", "external_launcher"],
                    "--distributed-executor-backend",
                ),
                (
                    [DELTAS, "--distributed-executor-backend", "ray", "--enable-lora"],
                    "Ray and --enable-lora",
                ),
            )
        ),
    ],
)
def test_vllm_refuses_arguments(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parsed_by_vllm(*arguments)


def test_vllm_refuses_its_older_executor_for_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")
    with pytest.raises(ValueError, match="VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0"):
        parsed_by_vllm(DELTAS, "--distributed-executor-backend", "ray")


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        # With the hybrid manager vLLM imports lmcache.
        ([*LMCACHE, "--disable-hybrid-kv-cache-manager"], {}, r"\(LMCacheMPConnector\)"),
        (["--kv-offloading-size", "1"], {}, r"\(OffloadingConnector\)"),
        (["--kv-offloading-size", "1"], {"VLLM_USE_SIMPLE_KV_OFFLOAD": "1"}, "SimpleCPUOffload"),
        (["--kv-transfer-config", PRODUCER], {}, r"kv_consumer \(kv_producer\)"),
        (["--load-format", "ipc_cache"], {}, "--load-format ipc_cache"),
        (["--offload-group-size", "2"], {}, "--offload-group-size"),
        ([], {"VLLM_ENABLE_STARTUP_PLAN": "1"}, "VLLM_ENABLE_STARTUP_PLAN"),
    ],
)
def test_vllm_refuses_what_it_derives(
    arguments: list[str],
    environment: dict[str, str],
    message: str,
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the configuration, in which `--kv-offloading-size` has become a connector."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    wanted = parsed_by_vllm(DELTAS, "--model", str(checkpoint("qwen3")), *arguments)
    with pytest.raises(ValueError, match=message):
        wanted.create_engine_config()


# SGLang's own parser and config, without starting a process for each.
SGLANG_PARSER = """
import json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
found = {}
for name, arguments in json.loads(sys.argv[1]).items():
    try:
        prepare_server_args(["--model-path", "m", "--device", "cpu", *arguments])
        found[name] = "taken"
    except ValueError as error:
        found[name] = str(error)
    except SystemExit:
        found[name] = "unknown"
print(json.dumps(found))
"""
SGLANG_REFUSES = {
    "attention": (
        [ENABLE, "--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"],
        "DP attention",
    ),
    "replicas and workers": (
        [ENABLE, "--dp-size", "2", "--tokenizer-worker-num", "2"],
        "--dp-size and --tokenizer-worker-num",
    ),
    "prefill": ([ENABLE, "--disaggregation-mode", "prefill"], "--disaggregation-mode (prefill)"),
    "hierarchical": ([ENABLE, "--enable-hierarchical-cache"], "--enable-hierarchical-cache"),
    "alias": ([ENABLE, "--enable-hicache"], "--enable-hierarchical-cache"),
    "storage": ([ENABLE, "--hicache-storage-backend", "file"], "--hicache-storage-backend (file)"),
    "sparse": ([ENABLE, "--enable-hisparse"], "--enable-hisparse"),
    "linker": (
        [ENABLE, "--enable-unified-cache-external-linker"],
        "--enable-unified-cache-external-linker",
    ),
    "lmcache": ([ENABLE, "--enable-lmcache"], "--enable-lmcache"),
    "offloading": ([ENABLE, "--offload-group-size", "2"], "--offload-group-size"),
    "draft": (
        [ENABLE, "--speculative-algorithm", "DFLASH"],
        "another --speculative-algorithm than",
    ),
    "draft and stages": (
        [ENABLE, "--speculative-algorithm", "EAGLE", "--pp-size", "2"],
        "a draft model and --pp-size",
    ),
    "token map": (
        [ENABLE, "--speculative-algorithm", "EAGLE", "--speculative-token-map", "hot.pt"],
        "--speculative-token-map",
    ),
    "nodes": ([ENABLE, "--nnodes", "2", "--dp-size", "2"], "several hosts"),
    "lora": ([ENABLE, "--enable-lora"], "--enable-lora"),
    "workers": ([ENABLE, "--tokenizer-worker-num", "2"], "--tokenizer-worker-num above 1"),
    "companion": (["--delta-tuning", "read-workers=2"], "needs --enable-delta-updates"),
}


def test_sglang_refuses_arguments() -> None:
    asked = json.dumps({name: arguments for name, (arguments, _) in SGLANG_REFUSES.items()})
    run = python("sglang", "-c", SGLANG_PARSER, asked)
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.splitlines()[-1])
    if found["alias"] == "unknown":  # SGLang 0.5.22 has only the long name, and ends with an error
        del found["alias"]
    wrong = {n: text for n, text in found.items() if SGLANG_REFUSES[n][1] not in text}
    assert wrong == {}


# Settings that an override for a model's architecture sets, which no command line shows.
SGLANG_RESOLVED = """
import sys
from sglang.srt.runtime_context import get_context
from engine_ext.adapters.refusals import first
from engine_ext.adapters.sglang.hooks import resolved_settings
from engine_ext.adapters.sglang.refusals import RESOLVED
with get_context().override_server_args():
    names = {one.name for refusal in RESOLVED for one in refusal.conditions}
    print(sorted(names - vars(resolved_settings()).keys()))
for setting in sys.argv[1:]:
    with get_context().override_server_args(**{setting: True}):
        found = first(resolved_settings(), RESOLVED)
    print("taken" if found is None else found.what.split(",")[0])
"""
SGLANG_DERIVES = {
    "skip_server_warmup": "taken",
    "enable_multi_layer_eagle": "--enable-multi-layer-eagle",
    "enable_hierarchical_cache": "--enable-hierarchical-cache",
    "enable_hisparse": "--enable-hisparse",
    "enable_lmcache": "--enable-lmcache",
    "enable_flexkv": "--enable-flexkv",
    "enable_unified_cache_external_linker": "--enable-unified-cache-external-linker",
}


def test_sglang_refuses_what_it_derives() -> None:
    run = python("sglang", "-c", SGLANG_RESOLVED, *SGLANG_DERIVES)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.splitlines()[-1 - len(SGLANG_DERIVES) :] == ["[]", *SGLANG_DERIVES.values()]


SGLANG_CACHES = """
from sglang.srt.runtime_context import get_context, get_memory
with get_context().override_server_args():
    print(*(name for name in vars(get_memory()) if not name.startswith("_")))
"""
# Each is refused, needs one that is refused, or only says how the pool of the engine is used.
SGLANG_REFUSED = {
    "enable_flexkv", "enable_hierarchical_cache", "enable_hisparse", "enable_lmcache",
    "enable_unified_cache_external_linker", "hicache_storage_backend", "radix_cache_backend",
}  # fmt: skip
SGLANG_NEED_THEM = (
    "flexkv_", "hicache_", "hisparse_", "lmcache_", "unified_cache_external_linker_",
    "enable_linker_mla_dedup",
)  # fmt: skip
SGLANG_POOL = {
    "disable_radix_cache", "enable_page_major_kv_layout", "enable_session_radix_cache",
    "enable_unified_memory", "radix_eviction_policy", "radix_eviction_policy_config",
}  # fmt: skip


def test_every_setting_of_sglangs_caches_is_known() -> None:
    """One that a release adds might keep KV where a flush of the cache does not reach it."""
    run = python("sglang", "-c", SGLANG_CACHES)
    assert run.returncode == 0, run.stderr[-2000:]
    found = set(run.stdout.splitlines()[-1].split())
    assert found >= SGLANG_REFUSED
    known = SGLANG_REFUSED | SGLANG_POOL
    assert {name for name in found - known if not name.startswith(SGLANG_NEED_THEM)} == set()


def test_sglang_serve_takes_the_flags_too() -> None:
    arguments = ["serve", "--model-type", "llm", "--model-path", "m", ENABLE, "--enable-lora"]
    program = "import sys; from sglang.cli.main import main; sys.exit(main())"
    run = python("sglang", "-c", program, *arguments)
    assert run.returncode != 0
    assert "--enable-delta-updates does not work with --enable-lora" in run.stderr


def test_sglang_without_the_plugin_has_no_flag() -> None:
    command = ["-m", "sglang.launch_server", "--model-path", "m", ENABLE]
    run = python("sglang", *command, SGLANG_PLUGINS="other")
    assert run.returncode != 0
    assert f"unrecognized arguments: {ENABLE}" in run.stderr
