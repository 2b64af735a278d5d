"""The status page of an engine: one HTML file for browsers, at ``GET /delta_dashboard``.

`page_response` answers with the page, made once of ``page.html``, ``page.css`` and ``page.js``. The
page holds nothing of the engine; its script fetches ``/delta_status`` from where it came.
`denied_response` answers a browser that is not allowed to see it with ``denied.html``, which says
what to do.

Imports: `engine_ext.errors`.
"""

from delta_server.dashboard.page import denied_response, from_browser, page_response

__all__ = ["denied_response", "from_browser", "page_response"]
