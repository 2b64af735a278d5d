"""Access to the endpoints: with the token; if none is set, from this host and trusted networks."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from fastapi import Request

from engine_ext.errors import AccessDenied, Unauthorized
from engine_ext.settings import API_KEY_ENVIRONMENT, api_key

_FORWARDED = ("forwarded", "x-real-ip", "via")
_FORWARDED_PREFIX = "x-forwarded-"
_SET_A_TOKEN = (
    "no token is set, so only clients on this host can use this endpoint; start the engine with "
    f"--delta-api-key or {API_KEY_ENVIRONMENT}, and send 'Authorization: Bearer'; or name the "
    "client's network with --delta-allow-from"
)


def check_access(request: Request, networks: Sequence[str] = ()) -> None:
    """Refuse a request without access to the delta endpoints, before its body is read.

    Args:
        networks: those whose clients count as clients on this host.

    Raises:
        Unauthorized: a token is set, and the request's is missing or different.
        AccessDenied: no token is set, and the request might come from another host.
    """
    token = api_key()
    if token is not None:
        check_token(request.headers.get("authorization"), token)
    else:
        check_client(request.client.host if request.client else None, request.headers, networks)


def check_token(authorization: str | None, token: str) -> None:
    """Compare a request's bearer token with the required one, in constant time.

    Raises:
        Unauthorized: it is missing or different.
    """
    scheme, _, given = (authorization or "").partition(" ")
    # Hashing makes the lengths equal, so that the comparison does not leak them.
    same = hmac.compare_digest(_hash(given.strip()), _hash(token))
    # An empty token is a configuration mistake; nothing matches it.
    if scheme.lower() != "bearer" or not token or not same:
        raise Unauthorized(
            "this endpoint needs the engine's --delta-api-key: give it to commands in "
            f"{API_KEY_ENVIRONMENT} (delta-send --api-key), to a sender as api_key=, and with "
            "other clients as 'Authorization: Bearer ...'"
        )


def check_client(
    client: str | None, headers: Mapping[str, str], networks: Sequence[str] = ()
) -> None:
    """Refuse a request unless it comes from this host or a trusted network.

    Args:
        client: the peer's address; None if it is unknown, as on a Unix socket.
        headers: by lower-case names.
        networks: the trusted ones, as ``10.0.4.0/24``.

    Raises:
        AccessDenied: the peer is elsewhere, or it is a proxy, or a browser that acts for a page of
            another site.
    """
    if client is None or not (_is_loopback(client) or _is_in(client, networks)):
        raise AccessDenied(_SET_A_TOKEN)
    for name in headers:
        if name in _FORWARDED or name.startswith(_FORWARDED_PREFIX):
            raise AccessDenied(f"{_SET_A_TOKEN}. A proxy has forwarded this request: {name}")
    # Only browsers send these.
    if "origin" in headers or "sec-fetch-site" in headers:
        sites = (headers.get("origin", ""), "//" + headers.get("host", ""))
        hosts = [_host_of(site) for site in sites if site]
        if not all(host == "localhost" or _is_loopback(host) for host in hosts):
            raise AccessDenied(f"{_SET_A_TOKEN}. A page of another site has sent this request")
    # They send neither for a page's own host name, which might resolve to this host by now
    # (DNS rebinding).
    if "host" in headers and not _may_be_this_host(_host_of("//" + headers["host"])):
        raise AccessDenied(f"{_SET_A_TOKEN}. The request's 'Host' is not a name of this host")


def _may_be_this_host(host: str) -> bool:
    """Return whether a host name is an address, this host's name, or not a public name."""
    public = "." in host and not host.endswith(".localhost")
    return not public or _address(host) is not None or host == socket.gethostname().lower()


def _host_of(origin: str) -> str:
    try:
        return urlsplit(origin).hostname or ""
    except ValueError:
        return "."  # no host's name


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _is_loopback(host: str) -> bool:
    address = _unmapped(host)
    return address is not None and address.is_loopback


def _is_in(host: str, networks: Sequence[str]) -> bool:
    address = _unmapped(host)
    return address is not None and any(address in ipaddress.ip_network(n) for n in networks)


def _unmapped(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return an address; that of an IPv4 peer of an IPv6 socket as IPv4."""
    address = _address(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
