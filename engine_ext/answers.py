"""Words for messages: a server's answer, why there is none, some of many names, others' texts.

Imports nothing of `engine_ext`.
"""

from __future__ import annotations

import json
import os
import re
import ssl
from collections.abc import Collection, Iterable
from typing import Any, Final
from urllib.parse import urlsplit

_NO_ENDPOINT: Final = (404, 405, 501)  # what servers answer that do not know a path or a method
_SHOWN: Final = 200  # characters of a foreign answer
_NAMES: Final = 5  # in a list


def answer_in_words(
    status: int, text: str, server: str | None, url: str, *, proxies: bool = True
) -> str:
    """Return what a server has refused, in one line.

    Args:
        status: HTTP status, not 200.
        text: The body.
        server: The header ``Server``.
        url: That was asked for.
        proxies: The client uses the environment's proxies; one might have answered.
    """
    error = json_object(text).get("error")
    if isinstance(error, dict):
        said, tensor = f"{error.get('type')}: {error.get('message')}", error.get("tensor")
        named = "" if tensor is None or str(tensor) in said else f" ({tensor})"
        return f"HTTP {status}: {said}{named}"
    who, hint = f" ({server})" if server else "", _proxy_hint(url) if proxies else ""
    if status in _NO_ENDPOINT:
        return (
            f"HTTP {status}: no delta endpoint at {url}: the server there{who} is no engine with "
            f"--enable-delta-updates, or the address is not its root, http://HOST:PORT{hint}"
        )
    plain = " ".join(re.sub(r"<(style|script).*?</\1>|<[^>]*>", " ", text, flags=re.S).split())
    return f"HTTP {status} from {url}{who}: {plain[:_SHOWN] or 'no text'}{hint}"


def is_own_error(text: str) -> bool:
    """Return whether a body is an error of a delta endpoint."""
    return isinstance(json_object(text).get("error"), dict)


def failure_in_words(error: BaseException, url: str, *, proxies: bool = True) -> str:
    """Return why no answer came, in one line; what to do about it if that is known.

    Args:
        error: What a request of httpx raised, or the ImportError of a client that cannot be made.
        url: That was asked for.
        proxies: The client uses the environment's proxies; one might have failed.
    """
    if isinstance(error, ImportError) and (names := _socks_variables()):
        one_of, is_set = " and ".join(names), "names" if len(names) == 1 else "name"
        return (
            f'{one_of} {is_set} a SOCKS proxy, which needs pip install "httpx[socks]"; '
            f"or unset {one_of}"
        )
    return _failure(error, url) + (_proxy_hint(url) if proxies else "")


def _failure(error: BaseException, url: str) -> str:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError) and cause.reason == "WRONG_VERSION_NUMBER":
            return "the server there does not speak https: give http://HOST:PORT"
        if isinstance(cause, ConnectionRefusedError):
            return "nothing listens there (connection refused)"
        several = getattr(cause, "exceptions", ())  # of a host with several addresses
        cause = several[0] if several else cause.__cause__ or cause.__context__
    text = str(error)
    # A server that expects TLS closes the connection at the first byte of another protocol.
    hangs_up = url.startswith("http://") and "without sending a response" in text
    hint = " If it serves TLS, use https://" if hangs_up else ""
    return f"{type(error).__name__}: {text}{hint}" if text else type(error).__name__


def proxy_variable(url: str) -> str | None:
    """Return the environment variable whose proxy httpx uses for a URL; None without one."""
    from urllib.request import getproxies_environment, proxy_bypass

    try:
        scheme, host = urlsplit(url).scheme, urlsplit(url).hostname or ""
    except ValueError:  # no URL
        return None
    proxies = getproxies_environment()
    if proxy_bypass(host):
        return None
    used = next((f"{one}_proxy" for one in (scheme, "all") if proxies.get(one)), None)
    # Names in lower case take precedence, and come last.
    return max((name for name in os.environ if name.lower() == used), default=None)


def _proxy_hint(url: str) -> str:
    variable = proxy_variable(url)
    host = urlsplit(url).hostname
    if variable is None or host is None:
        return ""
    return f"; {variable} sends this request to a proxy: to go without it, add {host} to NO_PROXY"


def _socks_variables() -> list[str]:
    named = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
    return sorted(name for name, value in named.items() if value.lower().startswith("socks"))


def json_object(text: str) -> dict[str, Any]:
    """Return the JSON object in a body; an empty one if there is none."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def in_one_line(text: str, most: int = _SHOWN) -> str:
    """Return the first characters of a text that others have chosen, with what ends a line escaped.

    Args:
        most: characters of the text.
    """
    shown = (c if c.isprintable() else ascii(c)[1:-1] for c in text[:most])
    return "".join(shown) + ("..." if len(text) > most else "")


def some_of(names: Iterable[str]) -> str:
    """Return names in order, of many the first five and how many there are besides."""
    ordered = sorted(names)
    more = len(ordered) - _NAMES
    return ", ".join(ordered[:_NAMES]) + (f" and {more} more" if more > 0 else "")


def prefix_hint(name: str, known: Collection[str], whose: str = "the base") -> str:
    """Return a hint that a name is known with another prefix, or without one; "" if it is not.

    It begins with "; ", as it is appended to what is wrong with the name.
    """
    parts = name.split(".")
    for start in range(1, len(parts)):
        if (rest := ".".join(parts[start:])) in known:
            prefix = ".".join(parts[:start])
            return f"; {whose} has {rest}: take the prefix '{prefix}.' off the names"
    longer = next((one for one in known if one.endswith(f".{name}")), None)
    if longer is not None:
        return f"; {whose} has {longer}: put the prefix '{longer[: -len(name)]}' before the names"
    for start in range(1, len(parts) - 1):
        if parts[start - 1].isdigit():
            break
        prefix, rest = ".".join(parts[:start]), ".".join(parts[start:])
        same = (one.removesuffix(rest) for one in known if one.endswith(f".{rest}"))
        # One with a number is that of another layer.
        other = next((one for one in same if not any(map(str.isdigit, one.split(".")))), None)
        if other is not None:
            return f"; {whose} has {other}{rest}: put '{other}' in the place of '{prefix}.'"
    return ""
