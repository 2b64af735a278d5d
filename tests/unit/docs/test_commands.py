"""The commands that pages show take the options that they are shown with, and targets exist."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec

import pytest

from delta_sender import cli as send
from engine_ext import settings
from engine_ext.cli import log, plan, top
from scripts.doc_tables.__main__ import DOCS, README
from tests.support.cases import in_one_test

ROOT = DOCS.parent
COMMANDS = {"delta-send": send, "delta-plan": plan, "delta-log": log, "delta-top": top}
TEXTS = {page.name: page.read_text() for page in (README, *sorted(DOCS.glob("*.md")))}


def lines() -> list[tuple[str, list[str]]]:
    """Return page and words of each command in a block of the shell."""
    found = []
    for name, text in TEXTS.items():
        for block in re.findall(r"^ *```bash\n(.*?)^ *```", text, re.M | re.S):
            for line in block.replace("\\\n", " ").splitlines():
                for part in line.split("&&"):
                    words = shlex.split(part, comments=True)
                    while words and re.match(r"[A-Z_]+=", words[0]):
                        del words[0]
                    if words:
                        found.append((name, words))
    return found


LINES = lines()


def options(words: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if word.startswith("--")]


def named(line: tuple[str, list[str]]) -> str:
    return f"{line[0]}: {' '.join(line[1])[:50]}"


@in_one_test("line", [one for one in LINES if one[1][0] in COMMANDS])
def test_a_command_has_the_options_that_it_is_shown_with(
    line: tuple[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    command, *words = line[1]
    within = words[:1] if command == "delta-log" else []
    with pytest.raises(SystemExit):
        COMMANDS[command].main([*within, "--help"])
    said = capsys.readouterr().out
    assert said
    # delta-plan hands an engine's own flags on to the engine.
    engines = {"--tensor-parallel-size", "--speculative-config"}
    own = engines if command == "delta-plan" else set()
    assert [one for one in options(words) if one not in own and f"{one} " not in said] == []


@in_one_test("line", [one for one in LINES if one[1][0] == "make"])
def test_a_target_that_is_shown_exists(line: tuple[str, list[str]]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    words = [word for word in line[1][1:] if not word.startswith("-") and "=" not in word]
    assert re.search(rf"^{words[-1]}:.*##", makefile, re.M)


# Which test runs the lines that begin like this. Those of the tutorial run in one of their own.
RUN_BY = {
    "delta-send ": "tests/unit/docs/test_shell.py",
    "delta-log ": "tests/unit/docs/test_shell.py",
    "delta-top ": "tests/unit/docs/test_shell.py",
    "delta-plan http": "tests/unit/docs/test_shell.py",
    "curl ": "tests/unit/docs/test_shell.py",
    "python -c": "tests/unit/docs/test_shell.py",
    "openssl rand": "tests/unit/test_cluster_examples.py",
    "delta-plan MODEL_DIR": "tests/live/test_shown_servers.py",
    "vllm serve ": "tests/live/test_shown_servers.py",
    "python -m vllm.": "tests/live/test_shown_servers.py",
    "python -m sglang.": "tests/live/test_shown_servers.py",
    "make demo": "tests/live/test_shown_servers.py",
    "delta-conformance": "tests/unit/cli/test_conformance.py",
    "delta-conformance --model": "tests/live/test_conformance.py",
    "python -m delta_patches": "tests/patches/test_apply_patches.py",
    "python -m scripts.doc_tables": "tests/unit/docs/test_generated.py",
    "python -m scripts.survey": "tests/live/test_survey.py",
    "python3 -m scripts.gpu": "tests/unit/scripts/test_gpu.py",
    "promtool": "tests/dashboard/test_promtool.py",
    "prometheus": "tests/dashboard/test_promtool.py",
    ".venv/bin/python -m scripts.release": "tests/unit/scripts/test_release.py",
    "make gpu-bundle": "tests/unit/scripts/test_gpu_bundle.py",
    "make package": ".github/workflows/checks.yml",
    # No builder, cluster or scheduler here: what they are given is checked.
    "docker ": "tests/unit/test_dockerfile.py",
    "kubectl ": "tests/unit/test_cluster_examples.py",
    "sbatch ": "tests/unit/test_cluster_examples.py",
}
OF_A_SHELL = {"git", "cd", "mkdir", "export", "source", "pip", "uv"}


@in_one_test("line", [one for one in LINES if one[0] != "tutorial.md"])
def test_a_line_is_run_by_a_test(line: tuple[str, list[str]]) -> None:
    shown = " ".join(line[1])
    tests = [test for start, test in RUN_BY.items() if shown.startswith(start)]
    assert tests or line[1][0] in OF_A_SHELL
    assert all((ROOT / test).is_file() for test in tests)


@in_one_test("name", TEXTS)
def test_a_module_that_is_shown_exists(name: str) -> None:
    modules = set(re.findall(r"python -m (scripts\.[\w.]*\w)", TEXTS[name]))
    assert [one for one in sorted(modules) if find_spec(one) is None] == []


@in_one_test("name", TEXTS)
def test_a_flag_that_is_shown_exists(name: str) -> None:
    known = {"--enable-delta-updates", "--delta-api-key", "--delta-tuning"}
    known |= {flag.name for flags in settings.FLAGS.values() for flag in flags}
    known |= {f"--delta-{key}" for key in settings.TUNING}
    shown = set(re.findall(r"(?<![\w-])--(?:enable-)?delta-[a-z]+(?:-[a-z]+)*", TEXTS[name]))
    assert shown - known == set()
    keys = set(re.findall(r"--delta-tuning ([a-z]+(?:-[a-z]+)*)", TEXTS[name]))
    assert keys - settings.TUNING.keys() == set()
