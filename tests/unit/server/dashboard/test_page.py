"""The status page: who gets it, what can run in it, and that it reads what the engine answers."""

from __future__ import annotations

import base64
import hashlib
import re
import socket
import time
from collections.abc import Callable
from html.parser import HTMLParser
from importlib.resources import files
from typing import get_args

import httpx
import msgspec
import pytest
from prometheus_client import REGISTRY

from engine_ext.placement import Status
from engine_ext.ranks.operations import ScrubState, SyncRecord
from engine_ext.ranks.status import (
    EngineStatus,
    HealthState,
    HealthStatus,
    LogStatus,
    PauseStatus,
    ServerStatus,
    VersionStatus,
)
from engine_ext.settings import API_KEY_ENVIRONMENT
from tests.support.cases import case
from tests.support.delta_bodies import delta_part
from tests.support.endpoint_rig import Rig, assert_error

PAGE = "/delta_dashboard"
BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
SCRIPT = files("delta_server.dashboard").joinpath("page.js").read_text()
TOKEN = "a token"


class Elements(HTMLParser):
    """The elements of a page with their attributes, and the texts of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": []}
        self._in: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._in = tag

    def handle_endtag(self, tag: str) -> None:
        self._in = None

    def handle_data(self, data: str) -> None:
        if self._in in self.texts:
            self.texts[self._in].append(data)


def assert_page(response: httpx.Response, status: int = 200) -> None:
    assert response.status_code == status
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.text.startswith("<!doctype html>")


def policy(response: httpx.Response) -> dict[str, str]:
    rules = response.headers["content-security-policy"].split("; ")
    return {name: sources for name, _, sources in (rule.partition(" ") for rule in rules)}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> httpx.Response:
    """The page, as this host gets it of an engine without a token."""
    rig = Rig(tmp_path_factory.mktemp("spool"))
    response = rig.get(PAGE)
    rig.close()
    return response


@pytest.fixture
def guarded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setenv(API_KEY_ENVIRONMENT, TOKEN)
    return rig


@pytest.fixture
def denied(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """The errors of requests that were reported as refused."""
    errors: list[Exception] = []
    monkeypatch.setattr(rig.service.reporter, "report_denied", errors.append)
    return errors


def test_without_a_token_only_this_host_gets_it(rig: Rig, denied: list[Exception]) -> None:
    for headers in ({}, BROWSER):
        assert_page(rig.get(PAGE, headers=headers))
    response = rig.run(rig.request("GET", PAGE, peer=("10.0.4.9", 9)))
    assert_error(response, 403, "AccessDenied")
    forwarded = rig.get(PAGE, headers={"X-Forwarded-For": "10.0.4.9"})
    assert_error(forwarded, 403, "AccessDenied")
    assert len(denied) == 2


def test_a_browser_elsewhere_gets_a_page_that_says_what_to_do(
    rig: Rig, denied: list[Exception]
) -> None:
    elsewhere = rig.run(rig.request("GET", PAGE, peer=("10.0.4.9", 9), headers=BROWSER))
    forwarded = rig.get(PAGE, headers={**BROWSER, "X-Forwarded-<b>": "10.0.4.9"})
    for response in (elsewhere, forwarded):
        assert_page(response, 403)
        assert all(one in response.text for one in ("ssh -L", "DELTA_API_KEY", "allow-from"))
        assert "script-src" not in policy(response)
        page = Elements(response.text)
        assert page.texts["script"] == []
        assert "b" not in {tag for tag, _ in page.found}
    assert "x-forwarded-&lt;b&gt;" in forwarded.text.lower()
    assert len(denied) == 2


def test_trusted_networks_get_it(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(allow_from=("10.0.4.0/24",))
    assert_page(rig.run(rig.request("GET", PAGE, peer=("10.0.4.9", 9), headers=BROWSER)))


def test_the_token_opens_it(guarded: Rig, denied: list[Exception]) -> None:
    """Who has none gets the page if it is a browser, as the text of the 401."""
    response = guarded.get(PAGE, headers=BROWSER)
    assert_page(response, 401)
    assert response.headers["www-authenticate"] == "Bearer"
    assert denied == []  # every first visit is one
    wrong = {"Authorization": "Bearer wrong"}
    for number, headers in enumerate(({}, wrong, {**BROWSER, **wrong}), 1):
        with case(headers):
            assert_error(guarded.get(PAGE, headers=headers), 401, "Unauthorized")
            assert len(denied) == number
    assert_page(guarded.get(PAGE, headers={"Authorization": f"Bearer {TOKEN}"}))


def test_it_holds_nothing_of_the_engine(rig: Rig) -> None:
    before = rig.get(PAGE)
    assert rig.send(delta_part()).status_code == 200
    assert rig.get(PAGE).content == before.content
    assert before.headers["cache-control"] == "no-store"


def test_only_its_one_script_and_style_are_allowed(page: httpx.Response) -> None:
    rules, texts = policy(page), Elements(page.text).texts
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        [text] = texts[tag]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"
    assert rules["default-src"] == "'none'"
    assert rules["connect-src"] == "'self'"
    assert rules["require-trusted-types-for"] == "'script'"
    for rule in ("base-uri", "form-action", "frame-ancestors", "trusted-types"):
        assert rules[rule] == "'none'"
    assert "unsafe" not in page.headers["content-security-policy"]


def test_it_loads_nothing_and_has_no_inline_handlers(page: httpx.Response) -> None:
    for tag, attributes in Elements(page.text).found:
        assert not any(name.startswith("on") or name == "style" for name in attributes), tag
        assert attributes.get("href", "data:,") == "data:,"
        assert "src" not in attributes
    assert re.findall(r"https?://[^\"\s]*", SCRIPT) == ["http://www.w3.org/2000/svg"]


def test_text_does_not_become_markup() -> None:
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert sink not in SCRIPT


@pytest.mark.parametrize(
    ("group", "fields", "some"),
    [
        ("status", EngineStatus, {"engine", "ranks", "owner", "adapters", "history"}),
        ("version", VersionStatus, {"number", "published", "complete", "by_rank", "digest"}),
        ("health", HealthStatus, {"state", "asleep", "paused", "changed_externally"}),
        (r"health\.paused", PauseStatus, {"since", "by"}),
        ("server", ServerStatus, {"host", "model", "since", "seconds"}),
        ("log", LogStatus, {"newest", "folder", "problem"}),
        ("scrub", ScrubState, {"passes", "mismatched", "error"}),
        ("sync", SyncRecord, {"outcome", "version", "bytes", "nnz", "error"}),
    ],
)
def test_it_reads_what_the_engine_answers(
    group: str, fields: type[msgspec.Struct], some: set[str]
) -> None:
    read = set(re.findall(rf"(?<!\.)\b{group}\??\.(\w+)", SCRIPT))
    assert some <= read <= {*fields.__struct_fields__}


def test_the_groups_it_takes_apart_are_in_the_status() -> None:
    taken = re.findall(r"const \{ ([\w, ]+) \} = status;", SCRIPT)
    taken += re.findall(r"function problemOf\(\{ ([\w, ]+) \}\)", SCRIPT)
    assert len(taken) == 3
    assert {name for names in taken for name in names.split(", ")} <= {
        *EngineStatus.__struct_fields__
    }
    [names] = re.findall(r"function showPlan\(\{ ([\w, ]+) \}\)", SCRIPT)
    assert {*names.split(", ")} <= {*HealthStatus.__struct_fields__}


def test_its_script_finds_its_elements(page: httpx.Response) -> None:
    ids = {attributes.get("id") for _, attributes in Elements(page.text).found}
    assert set(re.findall(r'find\("#([\w-]+)', SCRIPT)) <= ids


def words(page: str, title: str) -> set[str]:
    """The words of one group of the legend."""
    [group] = re.findall(rf"<h3>{title}</h3>\n<dl>(.*?)</dl>", page, re.S)
    return set(re.findall(r"<dt>(.*?)</dt>", group))


def test_the_legend_has_every_word_that_the_page_shows(page: httpx.Response) -> None:
    text = page.text
    assert words(text, "States") == {*get_args(HealthState), "asleep", "unreachable"}
    statuses = {status.value for status in Status} - {Status.UNJUDGED.value}
    assert words(text, "How tensors are updated") == statuses
    known = {metric.name: metric for metric in REGISTRY.collect()}
    documented = known["delta_updates_syncs"].documentation.partition(": ")[2].partition(".")[0]
    outcomes = re.sub(r" \(.*?\)", "", documented).split(", ")
    assert words(text, "Outcomes of a sync") == set(outcomes)
    samples = known["delta_updates_full_syncs"].samples
    reasons = {sample.labels["reason"] for sample in samples} - {"other"}
    assert words(text, "Why a sync was full") == reasons


def test_the_status_names_host_model_and_uptime(rig: Rig) -> None:
    server = rig.get("/delta_status").json()["server"]
    assert (server["host"], server["model"]) == (socket.gethostname(), "checkpoint")
    assert 0 <= server["seconds"] <= time.time() - server["since"] + 1


def test_refused_tensors_fit_a_phone(page: httpx.Response) -> None:
    [style] = Elements(page.text).texts["style"]
    [phone] = re.findall(r"@media \(max-width: 40rem\) \{(.*?\n)\}", style, re.S)
    assert "#refused tr, #refused td { display: block; }" in phone
    assert "#refused td { overflow-wrap: anywhere; }" in style
