"""The keyword arguments of the senders: one declaration, for signatures, help and flags."""

from __future__ import annotations

import inspect

import pytest

from delta_sender import DeltaSender, MultiSender, ShardedSender, cli
from delta_sender.options import CommonOptions, MultiOptions, Options, declared, with_defaults

WITHOUT_FLAG = {
    "hmac_key",
    "timeout",
    "client",
    "snapshot_on",
    "changes_in_memory",
    "unchanged_warning",
}


@pytest.mark.parametrize(
    ("sender", "options"),
    [(DeltaSender, Options), (MultiSender, MultiOptions), (ShardedSender, CommonOptions)],
)
def test_signatures_and_docstrings_have_every_option(sender: type, options: type) -> None:
    parameters = inspect.signature(sender).parameters
    assert inspect.Parameter.VAR_KEYWORD not in {p.kind for p in parameters.values()}
    for name, option in declared(options).items():
        assert option.doc
        assert parameters[name].default == option.default
        assert f"{name}: {option.doc[:20]}" in (sender.__doc__ or "")


def test_flags_have_the_defaults_of_the_options() -> None:
    arguments = vars(cli.make_parser().parse_args(["--target", "t"]))
    defaults = with_defaults({})
    assert declared(MultiOptions).keys() - arguments.keys() == WITHOUT_FLAG
    assert all(arguments[name] == defaults[name] for name in arguments.keys() & defaults.keys())


@pytest.mark.parametrize(("given", "limit"), [("9", 9.0), ("0.5", 0.5), ("inf", None)])
def test_a_lag_limit(given: str, limit: float | None) -> None:
    arguments = cli.make_parser().parse_args(["--target", "t", "--lag-limit", given])
    assert arguments.lag_limit == limit


@pytest.mark.parametrize("unknown", [{"lag_limit": 1.0}, {"encodings": "auto"}])
def test_unknown_options_are_refused(unknown: dict[str, object]) -> None:
    with pytest.raises(TypeError, match=next(iter(unknown))):
        DeltaSender("http://engine:8000", {}.items(), **unknown)
    with pytest.raises(TypeError, match="bucket"):
        MultiSender(["http://engine:8000"], {}.items(), bucket=1)
