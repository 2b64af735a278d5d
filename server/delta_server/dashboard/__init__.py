"""The status page of an engine: one HTML file for browsers, at ``GET /delta_dashboard``.

`page_response` answers with the page, made once of ``page.html``, ``page.css`` and ``page.js``. The
page holds nothing of the engine; its script fetches ``/delta_status`` from where it came.

Imports: nothing of the project.
"""

from delta_server.dashboard.page import asks_for_token, page_response

__all__ = ["asks_for_token", "page_response"]
