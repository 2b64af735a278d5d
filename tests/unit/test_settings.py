from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_ext import settings
from engine_ext.settings import (
    API_KEY_ENVIRONMENT,
    ENVIRONMENT,
    Settings,
    add_arguments,
    bearer_headers,
    from_environment,
    from_namespace,
    parse_size,
)
from tests.support.cases import in_one_test
from tests.support.served_models import PROPERTY


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ENVIRONMENT, API_KEY_ENVIRONMENT):
        # Set first, so that what the code under test sets is undone too.
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)


def parse(*argv: str) -> Settings | None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser)
    return from_namespace(parser.parse_args(argv))


def test_nothing_without_the_flag() -> None:
    assert parse() is None
    assert from_environment() is None


def test_defaults_are_those_of_the_design() -> None:
    chosen = parse("--enable-delta-updates")
    assert chosen == Settings()
    assert chosen.chunk_bytes == 512 << 20
    assert chosen.stage_timeout == 60
    assert chosen.base_version == 0
    assert chosen.roots == ()
    assert chosen.scrub_interval is None


def test_every_flag(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    assert parse(
        "--enable-delta-updates",
        "--delta-tuning=chunk-bytes=1M",
        "--delta-tuning=read-workers=2",
        f"--delta-root={one}",
        f"--delta-root={two}",
        f"--delta-log={one}",
        "--delta-follow",
        "--delta-follow-group=rollout_1",
        "--delta-tuning=follow-interval=0.5",
        "--delta-tuning=follow-hold=2",
        f"--delta-tuning=spool-dir={tmp_path}",
        "--delta-tuning=max-body-bytes=2GiB",
        "--delta-tuning=max-uploads=3",
        "--delta-tuning=min-upload-rate=1M",
        "--delta-tuning=stage-timeout=1.5",
        "--delta-base-version=9223372036854775807",
        "--delta-min-version=12",
        "--delta-shadow-bytes=1G",
        "--delta-keep-plain",
        "--delta-scrub-interval=2.5",
    ) == Settings(
        chunk_bytes=1 << 20,
        read_workers=2,
        roots=(str(one), str(two)),
        log=str(one),
        follow=True,
        follow_group="rollout_1",
        follow_interval=0.5,
        follow_hold=2,
        spool_dir=str(tmp_path),
        max_body_bytes=2 << 30,
        max_uploads=3,
        min_upload_rate=1 << 20,
        stage_timeout=1.5,
        base_version=2**63 - 1,
        min_version=12,
        shadow_bytes=1 << 30,
        keep_plain=True,
        scrub_interval=2.5,
    )


def test_roots_are_real_paths(tmp_path: Path) -> None:
    """They are compared with the paths of disk requests after symlinks are resolved."""
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder)
    chosen = parse("--enable-delta-updates", f"--delta-root={link}")
    assert chosen is not None
    assert chosen.roots == (str(folder),)


@in_one_test(
    "flag",
    ["--delta-tuning=chunk-bytes=1M", "--delta-base-version=0", "--delta-tuning=stage-timeout=60"],
)
def test_a_companion_flag_alone_is_refused(flag: str) -> None:
    """Even with the default's value: the user expects an effect."""
    name = " ".join(flag.split("=")[:-1])
    with pytest.raises(ValueError, match=f"{name} needs --enable-delta-updates"):
        parse(flag)


def test_sixteen_flags_and_the_tuning_are_shown(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    shown = set(re.findall(r"--[a-z-]+", parser.format_help())) - {"--help"}
    assert len(shown - {"--delta-tuning"}) == 16
    text = re.sub(r"\s+", "", parser.format_help())  # keys are wrapped at hyphens
    assert [key for key in settings.TUNING if key not in text] == []


def test_the_last_value_of_a_key_counts() -> None:
    """As of other flags: an engine's configuration file comes before its command line."""
    keys = ["--delta-tuning=streams=2", "--delta-tuning=streams=3"]
    assert parse("--enable-delta-updates", *keys) == Settings(streams=3)


def test_tuning_takes_a_json_object() -> None:
    """As vLLM passes a mapping of its configuration file."""
    text = '{"streams": 4, "max-body-bytes": "2G", "stage-timeout": 1.5}'
    assert parse("--enable-delta-updates", "--delta-tuning", text) == Settings(
        streams=4, max_body_bytes=2 << 30, stage_timeout=1.5
    )


@in_one_test(
    ("text", "wrong"),
    [
        ("streams", "not KEY=VALUE: 'streams'"),
        ("streams=0", "streams: not a positive number: '0'"),
        ("uploads=3", "not a key: 'uploads'"),
        ("=3", "not a key: ''"),
        ("apply=loader", "apply: not scatter or masked: 'loader'"),
        ('{"streams": []}', "not a JSON object"),
        ('{"uploads": 3}', "not a key: 'uploads'"),
    ],
)
def test_tuning_names_what_is_wrong(
    text: str, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--enable-delta-updates", "--delta-tuning", text])
    shown = capsys.readouterr().err
    assert f"argument --delta-tuning: {wrong}" in shown


@in_one_test(
    ("flags", "needed"),
    [
        (["--delta-follow"], "--delta-log"),
        (["--delta-log=/", "--delta-follow-group=a"], "--delta-follow"),
        (["--delta-log=/", "--delta-tuning=follow-hold=0"], "--delta-follow"),
        (["--delta-log=/", "--delta-tuning=follow-interval=5"], "--delta-follow"),
    ],
)
def test_following_needs_a_log(flags: list[str], needed: str) -> None:
    with pytest.raises(ValueError, match=f"needs {needed}"):
        parse("--enable-delta-updates", *flags)


@in_one_test(
    "flag",
    [
        "--delta-follow-group=a/b",
        "--delta-follow-group=",
        "--delta-tuning=chunk-bytes=0",
        "--delta-tuning=chunk-bytes=-1",
        "--delta-tuning=chunk-bytes=1T",
        "--delta-tuning=chunk-bytes=",
        "--delta-tuning=max-body-bytes=1.5G",
        "--delta-tuning=read-workers=0",
        "--delta-tuning=read-workers=x",
        "--delta-tuning=stage-timeout=0",
        "--delta-tuning=stage-timeout=-1",
        "--delta-tuning=stage-timeout=inf",
        "--delta-tuning=stage-timeout=nan",
        "--delta-tuning=stage-timeout=soon",
        "--delta-scrub-interval=0",
        "--delta-base-version=-1",
        "--delta-base-version=9223372036854775808",
        "--delta-base-version=1.0",
        "--delta-base-version=\uff11",  # a digit, but not an ASCII one
        "--delta-root=/does/not/exist",
        "--delta-tuning=spool-dir=/does/not/exist",
    ],
)
def test_bad_values_are_refused_by_the_parser(flag: str) -> None:
    with pytest.raises(argparse.ArgumentError):
        parse("--enable-delta-updates", flag)


@in_one_test(
    ("text", "size"),
    [
        ("1", 1),
        ("1048576", 1 << 20),
        ("512M", 512 << 20),
        ("4GiB", 4 << 30),
        ("4gb", 4 << 30),
        ("3 k", 3 << 10),
        ("7B", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@PROPERTY
@given(st.integers(1, 1 << 40), st.sampled_from(["", "K", "m", "GiB"]))
def test_sizes_scale(number: int, unit: str) -> None:
    power = {"": 0, "K": 10, "m": 20, "GiB": 30}[unit]
    assert parse_size(f"{number}{unit}") == number << power


@PROPERTY
@given(st.text(max_size=8))
def test_a_size_is_positive_or_refused(text: str) -> None:
    with suppress(argparse.ArgumentTypeError):
        assert parse_size(text) > 0


def test_an_exported_setting_reaches_a_child_process(tmp_path: Path) -> None:
    chosen = Settings(roots=(str(tmp_path),), stage_timeout=0.25, base_version=2**63 - 1)
    chosen.export()
    assert from_environment() == chosen
    code = "from engine_ext.settings import from_environment; print(repr(from_environment()))"
    root = str(Path(settings.__file__).parents[1])
    child = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=True,
    )
    assert child.stdout.strip() == repr(chosen)


def test_a_damaged_environment_is_an_error_not_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, '{"chunk_bytes": "many"}')
    with pytest.raises(ValueError):
        from_environment()


def test_the_token_is_kept_out_of_the_namespace() -> None:
    """Engines log the namespace, so the token is in the environment instead."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["--enable-delta-updates", "--delta-api-key", "s3cret"])
    assert "s3cret" not in repr(args)
    assert os.environ[API_KEY_ENVIRONMENT] == "s3cret"
    assert "s3cret" not in repr(from_namespace(args))


@pytest.mark.parametrize("text", ["s3cret\n", " s3cret", "s3cret \r\n"])
def test_token_loses_white_space(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(API_KEY_ENVIRONMENT, text)
    assert bearer_headers() == bearer_headers(text) == {"Authorization": "Bearer s3cret"}


@pytest.mark.parametrize("text", ["", " \n"])
def test_client_sends_no_empty_token(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(API_KEY_ENVIRONMENT, text)
    assert bearer_headers() == bearer_headers(text) == {}


@in_one_test("text", ["s3\ncret", "s3crét", "s3\x7fcret", "s3cret\udcff"])
def test_message_names_bad_token_without_value(text: str) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["--enable-delta-updates", "--delta-api-key", text])
    for use in (bearer_headers, lambda: from_namespace(args)):
        with pytest.raises(ValueError, match=API_KEY_ENVIRONMENT) as caught:
            use()
        assert (type(caught.value), "s3" in str(caught.value)) == (ValueError, False)
