"""Manifests for Kubernetes have known fields and fit together; the job for Slurm runs."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from delta_sender.cli import make_parser
from delta_server.generation_guard import READY_PATH
from engine_ext.settings import API_KEY_ENVIRONMENT, FLAGS

ROOT = Path(__file__).parents[2]
MANIFESTS = sorted((ROOT / "examples" / "kubernetes").glob("*.yaml"))
SECRET = (ROOT / "docs" / "kubernetes.md").read_text()
JOB = ROOT / "examples" / "slurm" / "engine_and_trainer.sbatch"

# Fields that the manifests use, of the types of Kubernetes' API; others are typing errors.
POD = {"containers", "volumes", "restartPolicy"}
CONTAINER = {
    *("name", "image", "command", "args", "env", "ports", "resources", "volumeMounts"),
    *("startupProbe", "readinessProbe"),
}
PROBE = {"httpGet", "periodSeconds", "failureThreshold"}
SPECS = {
    ("apps/v1", "Deployment"): {"replicas", "selector", "template"},
    ("apps/v1", "StatefulSet"): {
        *("serviceName", "replicas", "podManagementPolicy", "selector", "template"),
    },
    ("batch/v1", "Job"): {"backoffLimit", "template"},
    ("v1", "Service"): {"clusterIP", "publishNotReadyAddresses", "selector", "ports"},
}


def objects(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def pods(path: Path) -> Iterator[dict[str, Any]]:
    for one in objects(path):
        if "template" in one.get("spec", {}):
            yield one["spec"]["template"]["spec"]


ALL = [one for path in MANIFESTS for one in objects(path)]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_have_known_fields(path: Path) -> None:
    for one in objects(path):
        spec = one.get("spec", {})
        assert set(spec) <= SPECS[one["apiVersion"], one["kind"]]
        assert set(one) <= {"apiVersion", "kind", "metadata", "spec", "type", "stringData"}
        if "selector" in spec and "template" in spec:
            labels = spec["template"]["metadata"]["labels"]
            assert spec["selector"]["matchLabels"].items() <= labels.items()
    for pod in pods(path):
        assert set(pod) <= POD
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert set(container) <= CONTAINER
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes
            assert all(isinstance(one, str) for one in container["command"] + container["args"])
            names = {port["name"] for port in container.get("ports", ())}
            for probe in (container[key] for key in container if key.endswith("Probe")):
                assert set(probe) <= PROBE
                assert probe["httpGet"]["port"] in names


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_give_flags_that_exist_and_the_token(path: Path) -> None:
    known = {flag for one in make_parser()._actions for flag in one.option_strings}
    known |= {flag.name for group in FLAGS.values() for flag in group} | {
        "--host",
        "--port",
        "--enable-delta-updates",
    }
    [made] = re.findall(r"create secret generic (\S+) --from-file=(\S+)=/dev/stdin", SECRET)
    for container in (container for pod in pods(path) for container in pod["containers"]):
        assert {arg for arg in container["args"] if arg.startswith("--")} <= known
        [token] = [one for one in container["env"] if one["name"] == API_KEY_ENVIRONMENT]
        wanted = token["valueFrom"]["secretKeyRef"]
        assert (wanted["name"], wanted["key"]) == made


def test_clients_get_ready_engines_and_trainers_all() -> None:
    engines = [one for one in ALL if one["kind"] in ("StatefulSet", "Deployment")]
    for one in engines:
        [container] = one["spec"]["template"]["spec"]["containers"]
        assert container["readinessProbe"]["httpGet"]["path"] == READY_PATH
        assert container["startupProbe"]["httpGet"]["path"] == "/health"
    services = [one["spec"] for one in ALL if one["kind"] == "Service"]
    for spec in services:
        assert spec.get("publishNotReadyAddresses", False) is (spec.get("clusterIP") == "None")


def test_sender_names_each_engine_of_the_set() -> None:
    [engines] = [one for one in ALL if one["kind"] == "StatefulSet"]
    [job] = [one for one in ALL if one["kind"] == "Job"]
    service = engines["spec"]["serviceName"]
    assert {"clusterIP": "None"}.items() <= next(
        one["spec"] for one in ALL if (one["kind"], one["metadata"]["name"]) == ("Service", service)
    ).items()
    [container] = job["spec"]["template"]["spec"]["containers"]
    sent = [arg for arg in container["args"] if arg.startswith("http://")]
    name = engines["metadata"]["name"]
    count = engines["spec"]["replicas"]
    assert sent == [f"http://{name}-{number}.{service}:8000" for number in range(count)]


PROGRAMS = {
    "scontrol": "printf 'node-a\\nnode-b\\n'",
    "srun": (
        'while [ "${1#--}" != "$1" ]; do case $1 in --nodelist=*) export ON=${1#*=};; esac; '
        'shift; done; exec "$@"'
    ),
    "vllm": 'echo "engine on $ON: $*" >>"$SEEN"; touch "$SEEN.up"; exec sleep 60',
    "delta-top": '[ -e "$SEEN.up" ] && echo "asked $1" >>"$SEEN"',
    "sleep": '[ "$1" = 60 ] && exec /bin/sleep 60; exec /bin/sleep 0.05',
    "train": 'echo "trainer on $ON: $1, $ENGINE_URL, ${#DELTA_API_KEY}" >>"$SEEN"; exit 7',
}


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    """The environment of a job, with stand-ins for the programs that it runs."""
    for name, body in PROGRAMS.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/usr/bin/env bash\n{body}\n")
        program.chmod(0o755)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    seen = str(tmp_path / "seen")
    return {"PATH": path, "SEEN": seen, "MODEL": "/base", "SLURM_JOB_NODELIST": "node-[a-b]"}


def test_job_starts_engine_then_trainer(job: dict[str, str]) -> None:
    done = subprocess.run(
        ["bash", JOB, "train", "fast"],
        env=job,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 7, done.stderr  # the trainer's
    engine, asked, trainer = Path(job["SEEN"]).read_text().splitlines()
    flags = "--host 0.0.0.0 --port 8000 --enable-delta-updates"
    assert engine == f"engine on node-a: serve /base {flags}"
    assert asked == "asked http://node-a:8000"
    assert trainer == "trainer on node-b: fast, http://node-a:8000, 64"


def test_job_ends_if_the_engine_does_not_start(job: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "bin" / "vllm").write_text("#!/bin/sh\nexit 3\n")
    done = subprocess.run(
        ["bash", JOB, "train"], env=job, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode != 0
    assert not Path(job["SEEN"]).exists()
