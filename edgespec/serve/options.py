"""Options of the server: its address, its clients, and its limits."""

import ipaddress
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Literal

from edgespec_models.errors import EdgespecError, RequestError
from edgespec_models.schema import check_fields, length, matching, within

_Key = Annotated[str, matching(r"[!-~]{8,1000}", "of 8 to 1,000 printable ASCII characters, without spaces")]
_WEB = r"(?!(?i:https?)://\*?(:|$))"  # not pages of every host
_PLACE = r"(\*|(\*\.)?[\w.-]+|\[[\da-fA-F:.]+\]|)(:(\d+|\*))?"
_Origin = Annotated[
    str,
    matching(
        rf"(?a:null|{_WEB}[A-Za-z][\w+.-]*://{_PLACE})",
        "null, or SCHEME://HOST[:PORT] in ASCII and without a path; the port may be *, the host begin with "
        "*. or, where the scheme is neither http nor https, be *",
    ),
]
_HostName = Annotated[str, matching(r"[^/:\s]+|\[[^/\s]+\]", "a name or an address, without a port")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of the server: its address, its clients, and its limits.

    Attributes:
        host: The address to listen at. An address that other machines can reach needs ``api_key``.
        port: The port. 0 takes a free one.
        api_key: The key that requests have to send as bearer token. None lets everybody ask who reaches the
            address.
        allow_hosts: More names by which clients may call the server (the header ``Host``).
        allow_origins: Pages, windows of apps and extensions that may ask, besides the server's own page (the
            header ``Origin``): https://HOST[:PORT], https://*.example.com, http://localhost:*,
            tauri://localhost, chrome-extension://ID, null.
        max_request_bytes: The most bytes of a request. Longer ones are refused.
        timeout_s: Seconds that a request may take, waiting included. It then ends with what was written.
        body_timeout_s: Seconds within which a request has to arrive.
        shutdown_s: Seconds that running requests get to finish when the server ends.
        max_new_tokens: The most tokens of an answer whose request names no number. Without it up to the
            context's end; of a text to continue and of a fill, which need not end, 1,024.
        sampling: ``"recommended"`` answers chats as the makers of a model advise, where requests say nothing.
            Without it answers are greedy.
    """

    host: Annotated[str, length(1, 255)] = "127.0.0.1"
    port: Annotated[int, within(0, 65535)] = 8642
    api_key: _Key | None = field(default=None, repr=False)
    allow_hosts: tuple[_HostName, ...] = ()
    allow_origins: tuple[_Origin, ...] = ()
    max_request_bytes: Annotated[int, within(1024, 2**30)] = 32 * 2**20
    timeout_s: Annotated[float, within(above=0.0)] = 600.0
    body_timeout_s: Annotated[float, within(above=0.0)] = 30.0
    shutdown_s: Annotated[float, within(0.0)] = 10.0
    max_new_tokens: Annotated[int, within(1, 2**31 - 1)] | None = None
    sampling: Literal["recommended"] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.api_key is None and not is_loopback(self.host):
            raise RequestError(
                f"{self.host} can be reached from other machines: give a key that requests have to carry "
                "(--api-key-file FILE, or the environment variable EDGESPEC_API_KEY), or stay at 127.0.0.1"
            )


def origin_pattern(origins: Iterable[str]) -> str:
    """A regular expression for the allowed origins, as browsers write them."""
    patterns = list[str]()
    for origin in origins:
        scheme, mark, place = origin.partition("://")
        parts = re.fullmatch(r"(\[.*\]|[^:]*):?(.*)", place)
        assert parts is not None  # any text matches
        host, port = parts.groups()
        name = re.escape(host.removeprefix("*."))
        name = r"[\w.-]+" if host == "*" else rf"([\w-]+\.)+{name}" if host.startswith("*.") else name
        usual = port in ("", {"http": "80", "https": "443"}.get(scheme.lower()))  # left out by browsers
        patterns.append(
            re.escape(scheme + mark) + name + ("" if usual else r"(:\d+)?" if port == "*" else f":{port}")
        )
    return f"(?ai:{'|'.join(patterns)})" if patterns else r"(?!)"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``, a name or an address."""
    return all(ipaddress.ip_address(address[0]).is_loopback for _, address in _resolved(host, 0))


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket bound to the address. EdgespecError if the port is taken or the address is not ours."""
    family, address = _resolved(host, port)[0]
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        if hasattr(socket, "SO_EXCLUSIVEADDRUSE"):  # otherwise Windows shares the port
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:  # connections of a server that just ended do not keep the port
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise EdgespecError(
            f"cannot listen at {host}, port {port}: {error.strerror}. Name another with --host and --port; "
            "port 0 takes one that is free."
        ) from error
    return bound


def _resolved(host: str, port: int) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
    """Address families and addresses, without the parts that only IPv6 has."""
    try:
        addresses = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise RequestError(f"{host!r} is no address of this machine: {error}") from error
    return [(family, (str(address[0]), port)) for family, _, _, _, address in addresses]
