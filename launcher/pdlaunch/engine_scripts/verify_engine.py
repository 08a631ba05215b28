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
        sys.exit(
            f"torchvision is installed beside torch {torch.__version__}, a build for CPUs: its "
            "CUDA build breaks transformers. For a CUDA engine, keep sources of torch for CPUs "
            "out of pip's configuration"
        )
    print(json.dumps({"vllm": stated, "torch": torch.__version__}))
