"""The status page in Chromium, over the real routes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from engine_ext.settings import API_KEY_ENVIRONMENT
from tests.dashboard.conftest import Opened, Served

TOKEN = "a-token"
PAYLOADS = [
    "<img src=x onerror=\"document.title='run'\">",
    "</script><script>document.title='run'</script>",
    "</style><svg onload=alert(1)>",
    "javascript:alert(1)",
    "{{constructor.constructor('alert(1)')()}}",
]
# One per reload, as the page asks for it.
UNTIL_NEXT_MS = 15_000

Open = Callable[..., Opened]


def fact(page: Page, name: str) -> str:
    row = page.locator("#facts > div", has=page.locator(f"dt:text-is({name!r})"))
    return row.locator("dd").inner_text()


def rows(page: Page, selector: str) -> list[list[str]]:
    found = page.locator(f"{selector} tbody tr").all()
    return [row.locator("td").all_inner_texts() for row in found]


def shown(opened: Opened) -> Page:
    expect(opened.page.locator("#content")).to_be_visible()
    return opened.page


def replaced(value: Any, payload: str) -> Any:
    """JSON with every text, also the keys of maps by name, replaced."""
    if isinstance(value, dict):
        return {key: replaced(one, payload) for key, one in value.items()}
    if isinstance(value, list):
        return [replaced(one, payload) for one in value]
    return payload if isinstance(value, str) else value


def test_it_shows_the_status(served: Served, open_page: Open) -> None:
    opened = open_page(served.url)
    page = shown(opened)
    assert opened.status == 200
    expect(page.locator("#state")).to_have_text("certain")
    assert fact(page, "version") == str(served.status["version"]["number"])
    assert fact(page, "the engine's weight version") == served.status["version"]["published"]
    assert fact(page, "digest") == served.status["version"]["digest"]
    assert rows(page, "table:has(#plan)") == [["exact", "3"]]
    assert page.title() == f"v{served.status['version']['number']} certain - delta-updates"
    expect(page.locator("#refused")).to_be_hidden()
    expect(page.locator("#login")).to_be_hidden()


def test_it_says_where_it_is_and_what_the_state_means(served: Served, open_page: Open) -> None:
    served.status["server"] = {"host": "engine-0", "model": "/m", "since": 0.0, "seconds": 7300.0}
    page = shown(open_page(served.url))
    assert (fact(page, "host"), fact(page, "model")) == ("engine-0", "/m")
    assert fact(page, "up for").startswith("2 hours, since ")
    assert fact(page, "last full sync").endswith(": sent in full")
    expect(page.locator("#meaning")).to_contain_text("The weights are those of the version")
    expect(page.locator("#legend dl").first).to_be_hidden()
    page.locator("#legend summary").click()
    expect(page.locator("#legend dl").first).to_be_visible()


def test_it_shows_who_owns_the_engine(served: Served, open_page: Open) -> None:
    owner = {"run": "a-run", "epoch": 2, "host": "trainer-host", "pid": 11, "since": 0.0}
    served.status["owner"] = owner
    served.status["version"]["run"] = "a-run"
    page = shown(open_page(served.url))
    assert fact(page, "run") == "a-run"
    assert fact(page, "owner").startswith("process 11 on trainer-host, epoch 2, since ")


def test_it_shows_a_pause_that_lasts(served: Served, open_page: Open) -> None:
    served.status["health"]["paused"] = {"since": 0.0, "seconds": 700.0, "by": "10.0.0.3"}
    page = shown(open_page(served.url))
    expect(page.locator("#problem")).to_contain_text("Generation is paused since")
    expect(page.locator("#problem")).to_contain_text("by 10.0.0.3.")


def test_it_shows_the_last_syncs(served: Served, open_page: Open) -> None:
    served.history[1] |= {"outcome": "refused", "error": "BaseMismatch", "message": "other bits"}
    page = shown(open_page(served.url))
    table = rows(page, "#syncs")
    assert [row[1] for row in table] == [sync["outcome"] for sync in served.history[::-1]]
    assert [row[2] for row in table][-1] == "7 \u2192 8"
    assert table[0][2].endswith(" full")
    assert table[0][9] == "full: sent in full"
    assert table[-2][9] == "BaseMismatch: other bits"
    paused = [sync for sync in served.history if "pause_ms" in sync["timings_ms"]]
    expect(page.locator("#pause-plot rect")).to_have_count(len(paused))
    received = [sync for sync in served.history if sync["bytes"]]
    expect(page.locator("#bytes-plot rect")).to_have_count(len(received))
    expect(page.locator("#bytes-plot rect.bad, #bytes-plot rect.warn")).to_have_count(1)
    title = page.locator("#pause-plot rect title").first.text_content() or ""
    assert re.fullmatch(r"version 8, committed: [\d.]+", title)


def test_plots_of_very_different_syncs_are_logarithmic(served: Served, open_page: Open) -> None:
    served.history[-1]["bytes"] = 10**9
    page = shown(open_page(served.url))
    plot = page.get_by_role("img", name="Bytes of")
    assert "logarithmic scale" in (plot.get_attribute("aria-label") or "")
    captions = page.locator("figcaption").all_inner_texts()
    assert captions == ["Pause of generation, ms", "Bytes received, logarithmic scale"]
    heights = [float(bar.get_attribute("height") or 0) for bar in plot.locator("rect").all()]
    assert min(heights) > 1
    assert heights[-1] == max(heights) > 100


def test_an_engine_without_syncs(served: Served, open_page: Open) -> None:
    served.history = []
    page = shown(open_page(served.url))
    assert rows(page, "#syncs") == []
    expect(page.locator("#pause-plot")).to_have_text("none yet")


def test_it_updates_by_itself(served: Served, open_page: Open) -> None:
    page = shown(open_page(served.url))
    served.history = [*served.history, {**served.history[0], "version": 4711}]
    served.status["version"]["number"] = 4711
    version = page.locator("#facts dd").first
    expect(version).to_have_text("4711", timeout=UNTIL_NEXT_MS)
    assert rows(page, "#syncs")[0][2].endswith("4711")


def test_it_asks_nobody_else(served: Served, open_page: Open) -> None:
    opened = open_page(served.url)
    shown(opened)
    paths = {url.removeprefix(served.url) for url in opened.requests if url != "data:,"}
    assert paths == {"/delta_dashboard", "/delta_status?history=true"}


def test_it_asks_for_the_token(
    served: Served, open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY_ENVIRONMENT, TOKEN)
    opened = open_page(served.url)
    page = opened.page
    assert opened.status == 401
    field = page.get_by_label("Token of the engine")
    expect(field).to_be_focused()
    expect(page.locator("#content")).to_be_hidden()
    field.fill("wrong")
    field.press("Enter")
    expect(page.get_by_role("alert")).to_have_text("The engine has refused this token.")
    field.fill("not\u2028a token")
    field.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("printable ASCII")
    asked = served.asked
    field.fill(TOKEN)
    field.press("Enter")
    shown(opened)
    expect(page.locator("#login")).to_be_hidden()
    assert served.asked > asked
    stores = "() => [Object.values(sessionStorage), Object.values(localStorage), document.cookie]"
    assert page.evaluate(stores) == [[TOKEN], [], ""]
    assert not any(TOKEN in url for url in opened.requests)
    page.reload()
    shown(opened)
    page.get_by_role("button", name="Forget the token").click()
    expect(field).to_be_visible()
    assert page.evaluate(stores) == [[], [], ""]
    expect(page.locator("#content")).to_be_hidden()


def test_another_tab_asks_again(
    served: Served, open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY_ENVIRONMENT, TOKEN)
    opened = open_page(served.url)
    opened.page.get_by_label("Token of the engine").fill(TOKEN)
    opened.page.get_by_role("button", name="Show").click()
    shown(opened)
    other = open_page(served.url)
    expect(other.page.locator("#login")).to_be_visible()


@pytest.mark.parametrize("payload", PAYLOADS)
def test_texts_of_others_are_only_texts(served: Served, open_page: Open, payload: str) -> None:
    """Names, messages and states of any content are shown as they are."""
    served.status = replaced(served.status, payload)
    served.status |= {
        "adapters": [{"name": payload, "version": payload, "digest": payload}],
        "scrub": {"passes": payload, "passed_at": 0, "mismatched": [payload], "error": payload},
        "log": {
            "folder": payload,
            "newest": payload,
            "problem": {"type": payload, "message": payload},
        },
        "staged": {"parts": [1], "num_parts": payload, "version": payload},
    }
    served.status["version"] |= {"number": payload, "by_rank": [payload, 3]}
    served.status["health"] |= {
        "uncertified": {payload: payload},
        "certification": [{payload: 1}],
        "changed_externally": payload,
        "paused": {"since": 0.0, "seconds": 1.0, "by": payload},
        "awaits_full_sync": True,
    }
    served.history = replaced(served.history, payload)
    for sync in served.history:
        sync |= {"version": payload, "base_version": payload, "error": payload, "message": payload}
    page = shown(open_page(served.url))
    page.locator("#refused summary").click()
    assert rows(page, "#refused") == [[payload, payload]]
    assert rows(page, "table:has(#plan)") == [[payload, "1"]]
    assert rows(page, "#syncs")[0][9] == f"{payload}: {payload}"
    assert fact(page, "takes no deltas before") == "full sync"
    assert payload in page.get_by_role("alert").inner_text()
    assert page.title() == f"v{payload} {payload} - delta-updates"
    assert page.locator("img, iframe, object, a, [onload], [onerror]").count() == 0
    assert page.locator("script").count() == 1


def test_disguising_characters_are_replaced(served: Served, open_page: Open) -> None:
    served.status["health"]["changed_externally"] = "a\u202egnp\u202c\x1b[31m"
    page = shown(open_page(served.url))
    expect(page.get_by_role("alert")).to_contain_text("a\ufffdgnp\ufffd\ufffd[31m")


def test_the_policy_stops_what_is_not_the_page(served: Served, open_page: Open) -> None:
    opened = open_page(served.url)
    page = shown(opened)
    markup = "() => { try { document.body.innerHTML = '<b>x</b>'; } catch (e) { return e.name; } }"
    assert page.evaluate(markup) == "TypeError"
    elsewhere = "() => fetch('http://127.0.0.1:9/').catch((e) => e.name)"
    assert page.evaluate(elsewhere) == "TypeError"
    handler = (
        "() => { try { document.body.setAttribute('onclick', '1'); } catch (e) { return e.name; } }"
    )
    assert page.evaluate(handler) == "TypeError"
    assert len(opened.errors) >= 3
    blocked = ("Content Security Policy", "TrustedHTML", "TrustedScript")
    assert all(any(word in error for word in blocked) for error in opened.errors)
    opened.errors.clear()


def test_no_other_page_can_frame_it(served: Served, open_page: Open) -> None:
    opened = open_page(served.url)
    page = shown(opened)
    page.goto("about:blank")
    page.set_content(f'<iframe src="{served.url}/delta_dashboard"></iframe>')
    page.wait_for_timeout(500)
    assert page.frames[-1].url.startswith("chrome-error:")
    assert opened.requests.count(f"{served.url}/delta_dashboard") == 2
    opened.errors.clear()


def test_an_engine_that_is_gone_and_comes_back(served: Served, open_page: Open) -> None:
    page = shown(open_page(served.url))
    served.end()
    expect(page.locator("#state")).to_have_text("unreachable", timeout=UNTIL_NEXT_MS)
    expect(page.locator("#content")).to_have_class("stale")
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("No status from the engine")
    expect(alert).to_contain_text(
        f"the last answer, of version {served.status['version']['number']}"
    )
    expect(page.locator("#age")).to_have_text(re.compile(r"updated \d+ s ago"))
    served.begin()
    expect(page.locator("#state")).to_have_text("certain", timeout=UNTIL_NEXT_MS)
    expect(page.locator("#content")).not_to_have_class("stale")
    expect(alert).to_be_hidden()


def test_an_engine_that_fails(served: Served, open_page: Open) -> None:
    served.fails = RuntimeError("the ranks are gone")
    page = open_page(served.url).page
    expect(page.locator("#state")).to_have_text("unreachable")
    expect(page.get_by_role("alert")).to_contain_text("500: ")
    expect(page.locator("#content")).to_be_hidden()


def test_uncertain_weights(served: Served, open_page: Open) -> None:
    served.status["health"]["state"] = "uncertain"
    served.status["version"]["by_rank"] = [8, 9]
    page = shown(open_page(served.url))
    expect(page.locator("#state")).to_have_class("badge bad")
    expect(page.get_by_role("alert")).to_contain_text("A write failed half-way")
    assert fact(page, "versions of the ranks") == "8, 9"


def test_mismatched_weights(served: Served, open_page: Open) -> None:
    served.status["health"] |= {"state": "mismatched", "mismatched": ["a.weight", "b"]}
    page = shown(open_page(served.url))
    expect(page.locator("#state")).to_have_text("mismatched")
    expect(page.locator("#state")).to_have_class("badge bad")
    expect(page.get_by_role("alert")).to_contain_text("are in a.weight, b: send a full sync")
    expect(page.get_by_role("alert")).not_to_contain_text("half-way")


def test_what_else_is_wrong(served: Served, open_page: Open) -> None:
    served.status["version"]["complete"] = False
    served.status["health"] |= {
        "asleep": True,
        "uncertified": {f"layer.{i}": "placed nowhere" for i in range(150)},
    }
    page = shown(open_page(served.url))
    expect(page.locator("#state")).to_have_text("asleep")
    expect(page.get_by_role("alert")).to_contain_text("Not all of this version")
    summary = page.locator("#refused summary")
    expect(summary).to_have_text("150 tensors cannot be updated, the first 100")
    summary.click()
    assert len(rows(page, "#refused")) == 100


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 1280])
def test_narrow_and_wide_light_and_dark(
    served: Served, open_page: Open, scheme: str, width: int
) -> None:
    served.status["health"]["changed_externally"] = "x" * 300
    opened = open_page(served.url, color_scheme=scheme, viewport={"width": width, "height": 700})
    page = shown(opened)
    # Only the table of syncs scrolls sideways.
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    background = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    dark = max(map(int, re.findall(r"\d+", background)[:3])) < 60
    assert dark == (scheme == "dark")
    for selector in ("caption", "#state", "#syncs .warn", "dd", "#problem"):
        text, behind = page.evaluate(
            """(selector) => {
                const node = document.querySelector(selector);
                const card = node.closest("section") ?? document.body;
                return [getComputedStyle(node).color, getComputedStyle(card).backgroundColor];
            }""",
            selector,
        )
        assert contrast(text, behind) >= 4.5, selector  # WCAG 2.2, level AA


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours, each as ``rgb(1, 2, 3)``; see WCAG 2.2."""
    bright, dim = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


def luminance(colour: str) -> float:
    shares = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_assistive_technology_finds_the_parts(served: Served, open_page: Open) -> None:
    page = shown(open_page(served.url))
    expect(page.get_by_role("heading", level=1)).to_contain_text("delta-updates")
    expect(page.get_by_role("status")).to_have_text("certain")
    table = page.get_by_role("table", name="The newest first")
    expect(table.get_by_role("columnheader")).to_have_count(10)
    for name in ("Pause in milliseconds of", "Bytes of"):
        expect(page.get_by_role("img", name=name)).to_be_visible()
    expect(page.locator("html")).to_have_attribute("lang", "en")
