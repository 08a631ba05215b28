"""Finds the sizes of a recipe's model where they are at hand; never downloads anything."""

from __future__ import annotations

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

_ROPE = ("rope_scaling", "rope_parameters")
# max_position_embeddings is the limit with these; with others, vLLM may serve a multiple of it.
_UNSTRETCHED = ("default", "mrope", "llama3", "longrope", "su")


def find(recipe: Recipe, config: Mapping[str, Any] | None = None) -> ModelShape | None:
    """The model's shape: what the recipe says, what we know, or what its config.json states."""
    if recipe.model_shape is not None:
        return recipe.model_shape
    return OWN_MODELS.get(recipe.model) or of_config(config)


def config_file(recipe: Recipe, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Where the model's config.json would be on this machine; None where it cannot be told."""
    if is_path(recipe.model):
        return Path(recipe.model) / "config.json"
    return _cached_config(recipe.model, environ)


def hub_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder that hub models are kept in."""
    home = environ.get("HF_HOME") or str(Path.home() / ".cache" / "huggingface")
    return Path(environ.get("HF_HUB_CACHE") or Path(home) / "hub")


def _cached_config(hub_id: str, environ: Mapping[str, str]) -> Path | None:
    repository = hub_cache(environ) / f"models--{hub_id.replace('/', '--')}"
    try:
        revision = (repository / "refs" / "main").read_text("utf-8").strip()
    except OSError:
        return None
    return repository / "snapshots" / revision / "config.json"


def text_sizes(content: Any) -> Mapping[str, Any] | None:
    """The part of a config that describes the language model."""
    if not isinstance(content, dict):
        return None
    # Multimodal models keep the language model's sizes one level down.
    text = content.get("text_config")
    return text if isinstance(text, dict) else content


def of_config(content: Any) -> ModelShape | None:
    """The shape that the content of a config.json states."""
    sizes = text_sizes(content)
    if sizes is None:
        return None
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


def longest(config: Mapping[str, Any]) -> int | None:
    """The model's own limit in tokens; None where position scaling or the config hides it."""
    sizes = text_sizes(config) or {}
    limit = sizes.get("max_position_embeddings")
    parts = (config, sizes)
    if any("model_max_length" in part for part in parts):
        return None
    if any(_is_stretched(part.get(key)) for part in parts for key in _ROPE):
        return None
    return limit if isinstance(limit, int) and limit > 0 else None


def _is_stretched(rope: object) -> bool:
    if not isinstance(rope, dict):
        return False
    kind = rope.get("rope_type", rope.get("type", "default"))
    # Some models have one such mapping a kind of layer.
    return kind not in _UNSTRETCHED or any(map(_is_stretched, rope.values()))
