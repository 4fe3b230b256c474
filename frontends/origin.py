"""Which web pages may drive this server: a browser says in ``Origin`` whose page it shows; other clients send none."""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit

_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})


def allowed(origin: str | None, host: str, configured: tuple[str, ...]) -> bool:
    """Whether a request with these ``Origin`` and ``Host`` headers may be served: no origin, a configured one, a page
    of this machine, or one of this very host where that is given as a number. A name proves nothing: whoever owns it
    may have pointed it here.
    """
    if origin is None or origin in configured or "*" in configured:
        return True
    try:
        page = urlsplit(origin)
        name = page.hostname
    except ValueError:
        return False
    if page.scheme not in ("http", "https") or name is None:
        return False
    return name in _LOCAL or (_is_number(name) and page.netloc.lower() == host.lower())


def _is_number(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
