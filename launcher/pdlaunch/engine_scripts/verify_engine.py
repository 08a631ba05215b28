"""Shows that an engine environment works: imports what a deployment needs, prints the versions."""

import importlib.metadata
import importlib.util
import json
import sys

import nixl  # noqa: F401
import torch
import vllm

if __name__ == "__main__":
    stated = importlib.metadata.version("vllm")
    if vllm.__version__ != stated:
        sys.exit(f"vllm says it is {vllm.__version__}, its metadata say {stated}")
    if "+cpu" in torch.__version__ and importlib.util.find_spec("torchvision"):
        sys.exit("torchvision is installed; its CUDA build breaks transformers beside CPU torch")
    print(json.dumps({"vllm": stated, "torch": torch.__version__}))
