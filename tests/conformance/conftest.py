"""`--subject package.module:factory` chooses the receiver; without it this project's own."""

from __future__ import annotations

from importlib import import_module

import pytest

from engine_ext.conformance.subject import SubjectFactory

OWN = ("engine_ext.conformance.receivers:scatter", "engine_ext.conformance.receivers:masked")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--subject",
        action="append",
        help="receiver under test, as package.module:factory; repeatable (tests/conformance)",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "subject" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("subject", None) or OWN
        metafunc.parametrize("subject", chosen, ids=lambda s: s.rsplit(":")[-1], indirect=True)


@pytest.fixture
def is_own(request: pytest.FixtureRequest) -> bool:
    """Whether the receivers under test are this project's."""
    return not request.config.getoption("subject", None)


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> SubjectFactory:
    """Makes the receiver under test."""
    module, _, factory = request.param.partition(":")
    make: SubjectFactory = getattr(import_module(module), factory)
    return make
