"""Reads facts about a recipe's model: its config, its weights, and what the hub says of it.

Downloads a config at most, and keeps nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import httpx

from pdlaunch import checkpoint, model_shape
from pdlaunch.doctor.facts import Hub, Model
from pdlaunch.recipe import Recipe, is_path

_HUB = "https://huggingface.co"
_HUB_TIMEOUT_S = 10.0
_TRUE = ("1", "true", "yes", "on")


def read(recipe: Recipe, location: str, environ: Mapping[str, str], *, ask_hub: bool) -> Model:
    """The recipe's model.

    Args:
        location: what `vllm serve` gets for it.
        environ: of the engine that loads it.
        ask_hub: whether to ask the hub about a model that is not on this machine.
    """
    is_made_here = recipe.model in model_shape.OWN_MODELS
    is_hub_model = not is_made_here and not is_path(recipe.model)
    file = (
        Path(location) / "config.json" if is_made_here else model_shape.config_file(recipe, environ)
    )
    config, problem = checkpoint.read_config(file)
    here = config is not None
    is_offline = any(
        environ.get(name, "").lower() in _TRUE
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )
    hub = None
    if is_hub_model and config is None and ask_hub and not is_offline:
        hub, config = _ask(recipe.model, environ)
    return Model(
        config=config,
        shape=recipe.model_shape if config is None else model_shape.of_config(config),
        weights=checkpoint.read_weights(file.parent) if file is not None and here else None,
        problem=problem,
        hub=hub,
        is_hub_model=is_hub_model,
        is_made_here=is_made_here,
        is_offline=is_offline,
    )


def _ask(hub_id: str, environ: Mapping[str, str]) -> tuple[Hub, Mapping[str, Any] | None]:
    url = f"{environ.get('HF_ENDPOINT', _HUB).rstrip('/')}/{hub_id}/resolve/main/config.json"
    token = environ.get("HF_TOKEN") or environ.get("HUGGING_FACE_HUB_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        answer = httpx.get(url, headers=headers, timeout=_HUB_TIMEOUT_S, follow_redirects=True)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return Hub(url, None, problem=str(error) or type(error).__name__), None
    skew_s = None
    with suppress(KeyError, ValueError, TypeError):
        skew_s = parsedate_to_datetime(answer.headers["Date"]).timestamp() - time.time()
    config = None
    if answer.is_success:
        with suppress(ValueError):
            content = answer.json()
            config = content if isinstance(content, dict) else None
    return Hub(url, answer.status_code, clock_skew_s=skew_s), config
