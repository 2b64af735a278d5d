"""The status page of an engine: one HTML file for browsers, at ``GET /delta_dashboard``.

`page_response` answers with the page, made once of ``page.html``, ``page.css`` and ``page.js``. The
page holds nothing of the engine; its script fetches ``/delta_status`` from where it came.
`denied_response` answers a browser that is not allowed to see it with ``denied.html``, which says
what to do.

Imports: `engine_ext.errors`.
"""

from __future__ import annotations

import base64
import hashlib
from html import escape
from importlib.resources import files
from typing import Final

from fastapi import Request
from fastapi.responses import HTMLResponse

from engine_ext.errors import DeltaError


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _hash(text: str) -> str:
    """Return a source of a Content-Security-Policy: the one inline script or style of this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


_STYLE: Final = _read("page.css")
_SCRIPT: Final = _read("page.js")
_PAGE: Final = _read("page.html").replace("{style}", _STYLE).replace("{script}", _SCRIPT)
_DENIED: Final = _read("denied.html").replace("{style}", _STYLE)


def _policy(*sources: str) -> str:
    """Return a policy: besides `sources` nothing runs and nothing is loaded.

    Names come from trainers: with trusted types a script cannot make markup of a string.
    """
    common = (
        f"style-src {_hash(_STYLE)}",
        "img-src data:",  # the empty icon
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
    return "; ".join(("default-src 'none'", *sources, *common))


_HEADERS: Final = {
    "Content-Security-Policy": _policy(f"script-src {_hash(_SCRIPT)}", "connect-src 'self'"),
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Vary": "Accept",
}


def from_browser(request: Request) -> bool:
    """Return whether a request is that of a browser that opens a page, which can send no token.

    It gets the page as the text of its 401: the page asks for the token.
    """
    accepted = request.headers.get("accept", "")
    return "text/html" in accepted and "authorization" not in request.headers


def page_response(status: int = 200) -> HTMLResponse:
    """Return the page."""
    challenge = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    return HTMLResponse(_PAGE, status, {**_HEADERS, **challenge})


def denied_response(error: DeltaError) -> HTMLResponse:
    """Return the page for a browser to which the engine shows nothing; it has no script."""
    page = _DENIED.replace("{message}", escape(str(error)))
    return HTMLResponse(page, error.status, {**_HEADERS, "Content-Security-Policy": _policy()})
