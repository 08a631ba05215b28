"""How much KV cache a model needs and a role offers. Pure; says nothing where it cannot be sure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import JsonValue

from pdlaunch.model_shape import text_sizes
from pdlaunch.recipe import PrefillSection, RoleSection

# vLLM's own default for the share of a device's memory.
DEFAULT_GPU_FRACTION = 0.92

_DTYPE_BYTES = {
    "float32": 4,
    "float": 4,
    "float16": 2,
    "half": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
# Checkpoints that say how the cache is quantized, too.
_QUANTIZED_CACHE_KEYS = ("kv_cache_scheme", "kv_cache_quant_algo")
# Layers of these models keep less than all tokens, or none.
_UNEVEN_KEYS = (
    "sliding_window",
    "attention_chunk_size",
    "layers_block_type",
    "hybrid_override_pattern",
    "attn_layer_indices",
    "full_attention_interval",
    "num_kv_shared_layers",
    "cross_attention_layers",
    "mamba_d_state",
    "mamba_n_heads",
    "ssm_cfg",
    "attn_layer_period",
    "attn_type_list",
    "block_configs",
    "block_types",
    "compress_ratios",
    "linear_attn_config",
    "mamba_step",
)
# Flags that spread the cache, or shrink it, in ways that are not worked out here.
_UNEVEN_FLAGS = (
    "decode-context-parallel-size",
    "prefill-context-parallel-size",
    "hf-overrides",
    "num-gpu-blocks-override",
)


def bytes_a_token(
    config: Mapping[str, Any], section: RoleSection, flags: Mapping[str, JsonValue]
) -> int | str:
    """What one worker of a role keeps of each token; or why that cannot be told."""
    sizes = text_sizes(config) or {}
    if sizes.get("use_sliding_window") is False:
        sizes = {**sizes, "sliding_window": None}
    layer_types = set(sizes.get("layer_types") or ())
    uneven = [key for key in _UNEVEN_KEYS if sizes.get(key)]
    uneven += sorted(str(kind) for kind in layer_types - {"full_attention"})
    uneven += [f"--{flag}" for flag in _UNEVEN_FLAGS if flag in flags]
    if uneven:
        return f"its layers do not all keep every token ({', '.join(uneven)})"
    item_bytes = _item_bytes((config, sizes), flags)
    layers = sizes.get("num_hidden_layers")
    if item_bytes is None or not isinstance(layers, int):
        return "its config does not tell the type or the number of its layers"
    stages = section.pipeline_parallel if isinstance(section, PrefillSection) else 1
    layers = math.ceil(layers / stages)
    items = _items_a_layer(sizes, section.tensor_parallel)
    if items is None:
        return "its config does not tell the size of its heads"
    return items * item_bytes * layers


def _items_a_layer(sizes: Mapping[str, Any], tensor_parallel: int) -> int | None:
    latent, rope = sizes.get("kv_lora_rank"), sizes.get("qk_rope_head_dim")
    if isinstance(latent, int) and isinstance(rope, int):
        # Multi-head latent attention: one latent, the same on every rank.
        return latent + rope
    heads = sizes.get("num_attention_heads")
    # Some families have other keys for fewer heads, or for values of another size than keys.
    kv_heads = sizes.get("num_key_value_heads")
    if not isinstance(heads, int) or not isinstance(kv_heads, int) or "v_head_dim" in sizes:
        return None
    hidden = sizes.get("hidden_size")
    head_dim = sizes.get("head_dim") or (hidden // heads if isinstance(hidden, int) else None)
    if not isinstance(head_dim, int):
        return None
    return 2 * max(1, kv_heads // tensor_parallel) * head_dim


def _item_bytes(parts: Sequence[Mapping[str, Any]], flags: Mapping[str, JsonValue]) -> int | None:
    """Of a config and of its part about the language model, either may tell."""
    cache = flags.get("kv-cache-dtype")
    if isinstance(cache, str) and cache != "auto":
        return _DTYPE_BYTES.get(cache)
    for quantized in (part.get("quantization_config") for part in parts):
        if isinstance(quantized, dict) and any(quantized.get(key) for key in _QUANTIZED_CACHE_KEYS):
            return None
    named = flags.get("dtype")
    if isinstance(named, str) and named != "auto":
        return _DTYPE_BYTES.get(named)
    told = (part.get(key) for part in parts for key in ("dtype", "torch_dtype"))
    stated = next(filter(None, told), None)
    # vLLM runs checkpoints of float32 in half precision unless told otherwise.
    return 2 if stated == "float32" else _DTYPE_BYTES.get(str(stated))
