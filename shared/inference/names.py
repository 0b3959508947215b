"""A name that stands for many servers, e.g. a headless service: each of its addresses is one.

    dns+http://vllm.default.svc:8000/v1

Plain http only: a certificate is made out for a name, not for an address.
"""

from __future__ import annotations

import asyncio
import socket
from urllib.parse import urlsplit

SCHEME = "dns+http"


def is_name(url: str) -> bool:
    """Whether the URL's host is looked up, again and again."""
    return url.startswith(f"{SCHEME}://")


async def addresses(url: str) -> list[str]:
    """The http URLs of all servers behind a name. Raises OSError."""
    parts = urlsplit(url)
    found = await asyncio.get_running_loop().getaddrinfo(
        parts.hostname, parts.port or 80, type=socket.SOCK_STREAM
    )
    hosts = dict.fromkeys(str(address[0]) for *_, address in found)
    return [
        f"http://{f'[{host}]' if ':' in host else host}:{parts.port or 80}{parts.path}"
        for host in hosts
    ]
