"""The page at ``/``: a chat in the browser. One file; the browser may load and run nothing but what is in it,
and may call nobody but this server.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import HTMLResponse

from octavo.api.probes import READ

PAGE = Path(__file__).with_name("page.html").read_text("utf-8")


def _hashes(tag: str) -> str:
    """The sources that Content-Security-Policy allows: the page's own ``tag`` elements, by their digests."""
    parts = re.findall(rf"<{tag}>(.*?)</{tag}>", PAGE, re.S)
    digests = [base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in parts]
    return " ".join(f"'sha256-{digest}'" for digest in digests)


HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; script-src {_hashes('script')}; style-src {_hashes('style')}; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes() -> APIRouter:
    routes = APIRouter()

    @routes.api_route("/", methods=READ)
    async def page() -> HTMLResponse:
        """Without a key: the page asks for one, and its calls carry it."""
        return HTMLResponse(PAGE, headers=HEADERS)

    return routes
