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
# Which features an engine has, by its version, in the order of the adapter's table.
OFFERED = {
    "vllm": {"0.31": [False] * 4, "0.32": [True] * 4, "0.33": [True] * 4},
    "sglang": {"0.5.22": [False], "0.5.23": [True]},
}
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
    assert offered == OFFERED[engine][version]


@pytest.mark.parametrize("engine", ADAPTERS)
def test_table_of_features_agrees_with_rows(engine: str) -> None:
    """Each engine version has the features that the documentation lists for it."""
    supported = ADAPTERS[engine].VERSIONS.supported
    features = ADAPTERS[engine].FEATURES
    assert {
        version: [number >= supported.index(feature.since) for feature in features]
        for number, version in enumerate(supported)
    } == OFFERED[engine]


@pytest.mark.full
@pytest.mark.parametrize("engine", ADAPTERS)
def test_another_version_is_refused_with_the_list(engine: str) -> None:
    module, *arguments = COMMANDS[engine]
    named = {versions.ENVIRONMENT: "0.1.2"}
    run = python(engine, "-m", module, *arguments, "--enable-delta-updates", **named)
    assert run.returncode != 0
    known = ADAPTERS[engine].VERSIONS
    refusal = f"does not work with {known.engine} 0.1.2 ({versions.ENVIRONMENT}); the supported "
    assert f"{refusal}versions are {', '.join(known.supported)}." in run.stderr


# Why start-up refuses two replicas, by the installed version of vLLM; None is no refusal.
REPLICAS = {
    "0.31": "it returns the answers of the first replica alone",
    "0.32": None,
    "0.33": None,
}


def test_replicas_of_vllm_need_answers_of_all() -> None:
    """The checks of start-up, on vLLM's own command line."""
    import vllm as installed
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = ["--model", "m", "--enable-delta-updates", "--data-parallel-size", "2"]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    refused = first(hooks._set_up(args), ARGUMENTS)
    expected = REPLICAS[vllm.VERSIONS.require(installed.__version__)]
    why = None if refused is None else refused.why
    assert (why is None) == (expected is None), why
    assert (expected or "") in (why or "")


def test_every_supported_version_has_a_row() -> None:
    assert tuple(REPLICAS) == vllm.VERSIONS.supported
