"""Who may ask: the headers Host, Origin and Authorization, checked before anything else.

Every web page that the user opens can reach a server at a loopback address through the browser. The header
Origin tells pages of other origins; the header Host tells a page whose name was made to point here (DNS
rebinding).
"""

import hmac
import ipaddress
import re

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from edgespec.serve.options import ServeOptions, origin_pattern
from edgespec.serve.problems import Problem

SCRIPTS = ("page.js", "answer.js", "figures.js", "store.js", "wire.js")
OPEN_PATHS = frozenset({"/", "/page.css", "/health", *(f"/{name}" for name in SCRIPTS)})
"""Paths that need no key: they tell nothing of the model, and the page asks for the key."""
_HOST = re.compile(r"(?a:(\[(?P<six>[\da-fA-F]*:[\da-fA-F:.]+)\]|(?P<name>[^\s\[\]:/@]+))(:\d{0,5})?)")


class Gate:
    """ASGI middleware that refuses requests under a foreign name, from foreign pages, or without the key."""

    def __init__(self, app: ASGIApp, options: ServeOptions) -> None:
        self._app, self._options = app, options
        self._origins = re.compile(origin_pattern(options.allow_origins))
        self._names = frozenset(
            name.strip("[]").lower() for name in ("localhost", options.host, *options.allow_hosts)
        )
        self._any_address = options.host.strip("[]") in ("0.0.0.0", "::")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or refuse a request."""
        if scope["type"] == "http":
            scope["path"] = scope["path"].rstrip("/") or "/"
            try:
                self._check(scope)
            except Problem as problem:
                await readable(problem, scope, self._options)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._may_be_called(hosts[0]):
            raise Problem(
                421,
                f"this server has no name {', '.join(hosts)[:200]!r}: call it by its address, or start "
                "it with --allow-host NAME",
                "host_not_allowed",
            )
        if "transfer-encoding" in headers and "content-length" in headers:  # proxies might see two requests
            close = {"Connection": "close"}
            raise Problem(400, "send either Content-Length or Transfer-Encoding, not both", headers=close)
        origins = headers.getlist("origin")
        if len(origins) > 1:
            raise Problem(403, f"there are {len(origins)} headers Origin; send one", "origin_not_allowed")
        origin = origins[0] if origins else None
        own = f"{scope['scheme']}://{hosts[0]}"
        if origin is not None and origin.lower() != own.lower() and not self._origins.fullmatch(origin):
            raise Problem(
                403,
                f"{origin[:200]!r} is not allowed here; to allow it, start the server with --allow-origin "
                f"{origin[:200]}",
                "origin_not_allowed",
            )
        if not scope["query_string"].isascii():  # HTTP requires ASCII, and Starlette fails without
            raise Problem(400, "the query is not ASCII; spell other characters as %XX", "invalid_query")
        preflight = scope["method"] == "OPTIONS" and origin is not None  # browsers send it without a key
        if not preflight and scope["path"] not in OPEN_PATHS:
            bearer = f"Bearer {headers['x-api-key']}" if "x-api-key" in headers else ""  # Anthropic's clients
            self._check_key(headers.get("authorization", bearer))

    def _may_be_called(self, host: str) -> bool:
        parts = _HOST.fullmatch(host)
        if parts is None:
            return False
        name = (parts["six"] or parts["name"]).lower()
        if name in self._names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or self._any_address  # an address cannot be made to point elsewhere

    def _check_key(self, authorization: str) -> None:
        if self._options.api_key is None:
            return
        kind, _, key = authorization.partition(" ")
        same = hmac.compare_digest(key.strip().encode(), self._options.api_key.encode())
        if kind.lower() != "bearer" or not same:
            raise Problem(
                401,
                "the key is missing or wrong; send the server's key as 'Authorization: Bearer KEY'",
                "invalid_api_key",
                {"WWW-Authenticate": "Bearer"},
            )


def readable(problem: Problem, scope: Scope, options: ServeOptions) -> JSONResponse:
    """A response that allowed pages can read, where Starlette's CORS middleware does not see it."""
    response, origin = problem.response(scope), Headers(scope=scope).get("origin", "")
    if re.fullmatch(origin_pattern(options.allow_origins), origin):
        response.headers.update({"Access-Control-Allow-Origin": origin, "Vary": "Origin"})
    return response
