"""What the tests of rendering share: an engine and settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pdlaunch.engine import Engine
from pdlaunch.render.cluster import Settings

ENGINE = Engine(
    variant="cuda",
    root=Path("/cache/engine"),
    python=Path("/cache/engine/bin/python"),
    vllm=Path("/cache/engine/bin/vllm"),
    router=Path("/cache/engine/bin/vllm-router"),
    version="0.32.0+pd.1",
    series_hash="abc",
)


def settings(name: str, **chosen: Any) -> Settings:
    """An operator's settings, with what the command line fills in."""
    return Settings(
        **{
            "name": name,
            "namespace": name,
            "image": "registry.example/pdlaunch:1",
            "side_channel_secret": f"{name}-side-channel",
        }
        | chosen
    )
