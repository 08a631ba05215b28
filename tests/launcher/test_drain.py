"""The middleware that takes an engine out of service, without an engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdlaunch.engine_middleware.pdlaunch_drain import STARTS_DRAINED, Drain


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Says which address was asked for."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["path"].encode()})


def ask(drain: Drain, method: str, path: str, key: str | None = None) -> tuple[int, str]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
    scope = {"type": "http", "method": method, "path": path, "headers": headers}
    asyncio.run(drain(scope, None, send))  # type: ignore[arg-type]
    return sent[0]["status"], sent[1]["body"].decode()


def test_out_of_service_health_fails_and_all_else_goes_on() -> None:
    drain = Drain(app)
    assert ask(drain, "GET", "/health") == (200, "/health")
    assert ask(drain, "POST", "/pdlaunch/drain")[0] == 200
    assert ask(drain, "GET", "/health")[0] == 503
    assert ask(drain, "GET", "/pdlaunch/health") == (200, "/health")
    assert ask(drain, "POST", "/v1/completions") == (200, "/v1/completions")
    assert ask(drain, "POST", "/pdlaunch/serve")[0] == 200
    assert ask(drain, "GET", "/health") == (200, "/health")


def test_only_a_post_changes_anything() -> None:
    drain = Drain(app)
    assert ask(drain, "GET", "/pdlaunch/drain")[0] == 405
    assert ask(drain, "GET", "/health")[0] == 200


def test_starts_out_of_service_where_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STARTS_DRAINED, "1")
    assert ask(Drain(app), "GET", "/health")[0] == 503


def test_where_requests_need_a_key_it_does_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "right")
    drain = Drain(app)
    for key in (None, "wrong"):
        assert ask(drain, "POST", "/pdlaunch/drain", key)[0] == 401
    assert ask(drain, "GET", "/health")[0] == 200
    assert ask(drain, "POST", "/pdlaunch/drain", "right")[0] == 200
    assert ask(drain, "GET", "/health")[0] == 503


def test_what_is_no_request_passes() -> None:
    seen = []

    async def lifespan(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    asyncio.run(Drain(lifespan)({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
    assert seen == ["lifespan"]
