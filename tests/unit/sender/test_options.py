"""The keyword arguments of the senders: one class, which signatures and flags agree with."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from typing import Any

import pytest

from delta_sender import DeltaSender, LogSender, MultiSender, SenderOptions, ShardedSender, cli
from delta_sender.diff import quantize
from delta_sender.encode.encoding_policy import AUTO
from delta_sender.options import CHOICES, ENGINE_ONLY, FLAGS, FLEET_ONLY, FORMS
from engine_ext.format import ENCODINGS

OPTIONS = {each.name: each for each in fields(SenderOptions)}
WITHOUT_FLAG = {
    "hmac_key",
    "timeout",
    "client",
    "snapshot_on",
    "changes_in_memory",
    "unchanged_warning",
    *FLEET_ONLY[1:],
}
ABSENT = {
    DeltaSender: {*FLEET_ONLY},
    MultiSender: set(),
    LogSender: {*ENGINE_ONLY},
    ShardedSender: {*ENGINE_ONLY, "log_differences"} - {"takeover", "full", *FLEET_ONLY},
}


@pytest.mark.parametrize("sender", ABSENT)
def test_signatures_have_the_options(sender: type) -> None:
    parameters = inspect.signature(sender).parameters
    assert inspect.Parameter.VAR_KEYWORD not in {p.kind for p in parameters.values()}
    assert OPTIONS.keys() - parameters.keys() == ABSENT[sender]
    for name in OPTIONS.keys() & parameters.keys():
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert (parameters[name].default, parameters[name].annotation) == (
            OPTIONS[name].default,
            OPTIONS[name].type,
        )
    assert "`SenderOptions`" in (sender.__doc__ or "")


def test_every_option_is_documented() -> None:
    documented = re.findall(r"^ {4}(\w+): ", inspect.getdoc(SenderOptions) or "", re.M)
    assert documented[: len(OPTIONS)] == [*OPTIONS]


def test_flags_have_the_defaults_of_the_options() -> None:
    arguments = vars(cli.make_parser().parse_args(["--target", "t"]))
    assert OPTIONS.keys() - arguments.keys() == WITHOUT_FLAG
    assert OPTIONS.keys() - FLAGS.keys() == WITHOUT_FLAG | {"full"}  # which is --allow-full
    for name in arguments.keys() & OPTIONS.keys():
        assert arguments[name] == OPTIONS[name].default


def test_choices_are_those_of_the_rooms_that_use_them() -> None:
    assert (*ENCODINGS, AUTO) == CHOICES
    assert tuple(quantize.FORMS) == FORMS


@pytest.mark.parametrize(("given", "limit"), [("9", 9.0), ("0.5", 0.5), ("inf", None)])
def test_a_lag_limit(given: str, limit: float | None) -> None:
    arguments = cli.make_parser().parse_args(["--target", "t", "--lag-limit", given])
    assert arguments.lag_limit == limit


@pytest.mark.parametrize("unknown", [{"lag_limit": 1.0}, {"encodings": "auto"}])
def test_unknown_options_are_refused(unknown: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=next(iter(unknown))):
        DeltaSender("http://engine:8000", {}.items(), **unknown)
    with pytest.raises(TypeError, match="bucket"):
        MultiSender(["http://engine:8000"], {}.items(), bucket=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "wrong",
    [
        {"encoding": "bitmap"},
        {"full": "never"},
        {"flush_cache": "pepper"},
        {"posts_in_flight": 0},
        {"posts_in_flight": -1},
        *({"bandwidth_limit": rate} for rate in (0, -1.0, float("inf"), float("nan"))),
    ],
    ids=str,
)
def test_unknown_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"not one of|at least|above|'pepper' is not True, False"):
        SenderOptions(**wrong)
