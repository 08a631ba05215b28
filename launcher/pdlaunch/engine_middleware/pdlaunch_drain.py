"""Runs inside `vllm serve`, as its --middleware: takes a running engine out of service and back.

Routers send nothing to an engine whose /health fails. What it has begun goes on, and its other
addresses answer. Needs nothing but Python; pdlaunch.draining is the other side.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

_Scope = MutableMapping[str, Any]
_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]

# In the environment: out of service from the start.
STARTS_DRAINED = "PDLAUNCH_STARTS_DRAINED"
DRAIN, SERVE, HEALTH = "/pdlaunch/drain", "/pdlaunch/serve", "/pdlaunch/health"


class Drain:
    """ASGI middleware. POST /pdlaunch/drain, and /health is 503 until POST /pdlaunch/serve.

    /pdlaunch/health is the engine's own health in either state.
    """

    def __init__(self, app: Callable[[_Scope, _Receive, _Send], Awaitable[None]]) -> None:
        self._app = app
        self._is_drained = STARTS_DRAINED in os.environ

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        path = scope["path"] if scope["type"] == "http" else ""
        if path in (DRAIN, SERVE):
            if scope["method"] != "POST":
                await _answer(send, 405)
            elif not _is_allowed(scope):
                await _answer(send, 401)
            else:
                self._is_drained = path == DRAIN
                await _answer(send, 200)
        elif path == "/health" and self._is_drained:
            await _answer(send, 503)
        else:
            if path == HEALTH:
                scope = {**scope, "path": "/health", "raw_path": b"/health"}
            await self._app(scope, receive, send)


def _is_allowed(scope: _Scope) -> bool:
    """Where requests need a key, this does too."""
    key = os.environ.get("VLLM_API_KEY")
    given = dict(scope["headers"]).get(b"authorization", b"")
    return not key or hmac.compare_digest(given, f"Bearer {key}".encode())


async def _answer(send: _Send, status: int) -> None:
    await send(
        {"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]}
    )
    await send({"type": "http.response.body", "body": b""})
