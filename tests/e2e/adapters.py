"""LoRA adapters of seeded random numbers for the tiny Qwen3: two seeds, two adapters."""

from __future__ import annotations

import json
import random
from array import array
from pathlib import Path

RANK = 8
LAYERS = 8
HIDDEN = 256
PROJECTED = 1024
TARGETS = ("q_proj", "k_proj", "v_proj")
# Served by both engines, each with the same weights.
SAME = ("first", "second")
# Has other weights on either engine.
AMBIGUOUS = "ambiguous"
# Changes answers at once, and yet leaves them to depend on the KV.
_STD = 0.08


def modules(folder: Path) -> dict[str, list[str]]:
    """By role, adapters as `vllm serve --lora-modules` takes them."""
    same = [f"{name}={write(folder / name, seed)}" for seed, name in enumerate(SAME)]
    return {
        role: [*same, f"{AMBIGUOUS}={write(folder / role, seed)}"]
        for seed, role in enumerate(("prefill", "decode"), len(SAME))
    }


def write(folder: Path, seed: int) -> Path:
    """An adapter as PEFT stores it. The engine's libraries are not here, and not needed."""
    chosen = random.Random(seed)
    header: dict[str, object] = {}
    data = bytearray()
    for layer in range(LAYERS):
        for target in TARGETS:
            for half, shape in (("A", (RANK, HIDDEN)), ("B", (PROJECTED, RANK))):
                values = array("f", (chosen.gauss(0, _STD) for _ in range(shape[0] * shape[1])))
                name = f"base_model.model.model.layers.{layer}.self_attn.{target}.lora_{half}"
                begin = len(data)
                data += values.tobytes()
                header[f"{name}.weight"] = {
                    "dtype": "F32",
                    "shape": shape,
                    "data_offsets": (begin, len(data)),
                }
    head = json.dumps(header).encode()
    folder.mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_bytes(
        len(head).to_bytes(8, "little") + head + data
    )
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": TARGETS,
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
