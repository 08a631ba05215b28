"""Finds the sizes of a recipe's model where they are at hand; never downloads anything."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdlaunch.recipe import ModelShape, Recipe, is_path

# The models that pdlaunch makes itself; their names are all that `embedded:` and `random:` accept.
OWN_MODELS: Mapping[str, ModelShape] = {
    "embedded:smollm2-135m-instruct": ModelShape(attention_heads=9, kv_heads=3, layers=30),
    "random:tiny-qwen3": ModelShape(attention_heads=8, kv_heads=8, layers=8),
    "random:tiny-gemma3": ModelShape(attention_heads=4, kv_heads=4, layers=6),
    "random:tiny-mistral": ModelShape(attention_heads=8, kv_heads=4, layers=4),
    "random:tiny-deepseek-v2": ModelShape(attention_heads=4, kv_heads=4, layers=4),
    "random:tiny-granite-hybrid": ModelShape(attention_heads=4, kv_heads=4, layers=4),
}


def find(recipe: Recipe, environ: Mapping[str, str] = os.environ) -> ModelShape | None:
    """The model's shape: what the recipe says, what we know, or a config.json on this machine."""
    if recipe.model_shape is not None:
        return recipe.model_shape
    if recipe.model in OWN_MODELS:
        return OWN_MODELS[recipe.model]
    config = (
        Path(recipe.model) / "config.json"
        if is_path(recipe.model)
        else _cached_config(recipe.model, environ)
    )
    return None if config is None else _read(config)


def _cached_config(hub_id: str, environ: Mapping[str, str]) -> Path | None:
    home = environ.get("HF_HOME") or str(Path.home() / ".cache" / "huggingface")
    hub = Path(environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    repository = hub / f"models--{hub_id.replace('/', '--')}"
    try:
        revision = (repository / "refs" / "main").read_text("utf-8").strip()
    except OSError:
        return None
    return repository / "snapshots" / revision / "config.json"


def _read(config: Path) -> ModelShape | None:
    try:
        content: Any = json.loads(config.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict):
        return None
    # Multimodal models keep the language model's sizes one level down.
    text = content.get("text_config")
    sizes = text if isinstance(text, dict) else content
    heads = sizes.get("num_attention_heads")
    kv_heads = sizes.get("num_key_value_heads", heads)
    layers = sizes.get("num_hidden_layers")
    if not isinstance(heads, int) or not isinstance(kv_heads, int) or min(heads, kv_heads) < 1:
        return None
    return ModelShape(
        attention_heads=heads,
        kv_heads=kv_heads,
        layers=layers if isinstance(layers, int) and layers > 0 else None,
    )
