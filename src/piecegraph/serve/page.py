"""The page at ``/``."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from pathlib import Path

from starlette.responses import Response


def page() -> Response:
    """One file that fetches nothing but answers of this server."""
    html, headers = _file()
    return Response(html, media_type="text/html", headers=headers)


@functools.cache
def _file() -> tuple[str, dict[str, str]]:
    """With its headers: what runs in it is named by its hash, and no text can be taken for HTML by accident."""
    html = Path(__file__).with_suffix(".html").read_text("utf-8")
    rules = {
        "default-src": "'none'",
        "script-src": _hash_of("script", html),
        "style-src": _hash_of("style", html),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return html, {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in rules.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def _hash_of(tag: str, html: str) -> str:
    (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
