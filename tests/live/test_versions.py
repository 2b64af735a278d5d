"""Versions of an engine: which start, and whether the table of their features is right."""

from __future__ import annotations

import json

import pytest

from engine_ext.adapters import versions
from engine_ext.adapters.refusals import first
from engine_ext.adapters.sglang import features as sglang
from engine_ext.adapters.vllm import features as vllm
from engine_ext.adapters.vllm import hooks
from engine_ext.adapters.vllm.refusals import ARGUMENTS
from tests.live.programs import python

pytestmark = pytest.mark.versions

ADAPTERS = {"vllm": vllm, "sglang": sglang}
FIND = """
import importlib, json, sys
features = importlib.import_module(f"engine_ext.adapters.{sys.argv[1]}.features")
engine = importlib.import_module(sys.argv[1])
offered = [feature.offered() for feature in features.FEATURES]
print(json.dumps([features.VERSIONS.require(engine.__version__), offered]))
"""
COMMANDS = {
    "vllm": ["vllm.entrypoints.openai.api_server", "--model", "m"],
    "sglang": ["sglang.launch_server", "--model-path", "m", "--device", "cpu"],
}


@pytest.mark.full
@pytest.mark.parametrize("engine", ADAPTERS)
def test_the_table_of_features_is_right(engine: str) -> None:
    run = python(engine, "-c", FIND, engine)
    assert run.returncode == 0, run.stderr[-2000:]
    version, offered = json.loads(run.stdout.splitlines()[-1])
    supported = ADAPTERS[engine].VERSIONS.supported
    assert offered == [
        supported.index(version) >= supported.index(feature.since)
        for feature in ADAPTERS[engine].FEATURES
    ]


@pytest.mark.full
@pytest.mark.parametrize("engine", ADAPTERS)
def test_another_version_is_refused_with_the_list(engine: str) -> None:
    module, *arguments = COMMANDS[engine]
    named = {versions.ENVIRONMENT: "0.1.2"}
    run = python(engine, "-m", module, *arguments, "--enable-delta-updates", **named)
    assert run.returncode != 0
    known = ADAPTERS[engine].VERSIONS
    refusal = f"does not work with {known.engine} 0.1.2 ({versions.ENVIRONMENT}); the supported "
    assert f"{refusal}versions are {' and '.join(known.supported)}" in run.stderr


def test_replicas_of_vllm_need_answers_of_all() -> None:
    """The checks of start-up, on vLLM's own command line."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = ["--model", "m", "--enable-delta-updates", "--data-parallel-size", "2"]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    refused = first(hooks._set_up(args), ARGUMENTS)
    if vllm.replicas_answer_together():
        assert refused is None
    else:
        assert refused is not None
        assert "it returns the answers of the first replica alone" in refused.why
