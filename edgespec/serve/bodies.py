"""Requests' bodies: JSON of bounded size that arrives in bounded time."""

import asyncio
import json
from typing import Any, NoReturn

from starlette.requests import Request

from edgespec.serve.options import ServeOptions
from edgespec.serve.problems import Problem

__all__ = ["read_json"]

_CLOSE = {"Connection": "close"}  # what is still on its way would be read as the next request


async def read_json(request: Request, options: ServeOptions) -> dict[str, Any]:
    """The JSON object that a request carries.

    Raises:
        Problem: it is too long (413), too slow (408), not said to be JSON (415), or not a JSON object (400).
        ClientDisconnect: the client left.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # pages of other origins can send other kinds without asking
        raise Problem(415, f"the Content-Type is {kind!r:.80}; send application/json", headers=_CLOSE)
    try:
        async with asyncio.timeout(options.body_timeout_s):
            data = await _read(request, options.max_request_bytes)
    except TimeoutError:
        raise Problem(
            408, f"the request did not arrive within {options.body_timeout_s:g} s", headers=_CLOSE
        ) from None
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise Problem(400, f"the request is not JSON: {error}", "invalid_json") from error
    if not isinstance(value, dict):
        raise Problem(400, "the request is not a JSON object", "invalid_json")
    return value


async def _read(request: Request, limit: int) -> bytes:
    length = request.headers.get("content-length", "0")
    data = bytearray()
    if length.isdecimal() and int(length[:20]) <= limit:
        async for chunk in request.stream():
            data += chunk
            if len(data) > limit:
                break
        else:
            return bytes(data)
    raise Problem(
        413, f"a request may have {limit:,} bytes (--max-request-bytes)", "request_too_large", _CLOSE
    )


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
