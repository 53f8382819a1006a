"""The page on `/`: chat with this server, in plain files beside this one. It loads nothing from another host, and a
browser is told not to let it."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

ROOT = Path(__file__).resolve().parent / "page"
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class Web:
    def __init__(self) -> None:
        self._files = {path: ((ROOT / name).read_bytes(), kind) for path, (name, kind) in FILES.items()}

    async def file(self, request: Request) -> Response:
        body, kind = self._files[request.scope["route"].path]
        return Response(body, headers={**HEADERS, "content-type": kind})
