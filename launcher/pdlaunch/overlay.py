"""Lays upstream's source tree over an engine's compiled files, to run upstream's tests in.

The engine itself is not touched: the tree's Python files shadow the installed ones.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

from pdlaunch import engine_install, git, sdist
from pdlaunch import packages as published
from pdlaunch.console import Reporter
from pdlaunch.engine import Engine, packages_of
from pdlaunch.errors import PdError
from pdlaunch.series import Patch
from pdlaunch.upstream import Upstream

# What upstream's unit tests import beyond what an engine needs.
_TEST_TOOLS = (
    "hypothesis>=6,<7",
    "pytest>=8,<10",
    "pytest-asyncio>=1,<2",
    "pytest-timeout>=2,<3",
    "tblib>=3,<4",
)
# Imported at the top of files most of whose tests do without it; those that start a cluster
# fail at once instead of hanging. vLLM itself takes it for absent, as in the engine.
_RAY = """def __getattr__(name):
    raise AttributeError(f"ray.{name}: there is no Ray here")
"""
# Upstream's unit tests name these models but read nothing of them but the configuration.
_OPT: dict[str, object] = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "activation_function": "relu",
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "max_position_embeddings": 2048,
    "torch_dtype": "float16",
    "vocab_size": 50272,
}
_MODEL_CONFIGS: dict[str, dict[str, object]] = {
    "facebook/opt-125m": _OPT
    | {
        "hidden_size": 768,
        "word_embed_proj_dim": 768,
        "ffn_dim": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "do_layer_norm_before": True,
    },
    "facebook/opt-350m": _OPT
    | {
        "hidden_size": 1024,
        "word_embed_proj_dim": 512,
        "ffn_dim": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "do_layer_norm_before": False,
    },
}


def lay_out(tree: Path, upstream: Upstream, engine: Engine, reporter: Reporter) -> None:
    """Unpacks the source without any patch and adds what only a built wheel has."""
    archive = published.fetch(upstream.sdist, reporter)
    with reporter.work(f"unpacking vLLM {upstream.version}"):
        sdist.unpack(archive, tree)
    # Found first, its metadata would hide the engine's, whose version says that it is for CPU.
    for metadata in tree.glob("*.egg-info"):
        shutil.rmtree(metadata)
    installed = engine_install.site_packages(engine.root) / "vllm"
    for path in installed.rglob("*"):
        target = tree / "vllm" / path.relative_to(installed)
        # A Python file that only the engine has is one that a patch adds.
        wanted = path.is_file() and path.suffix not in (".py", ".pyc")
        if wanted and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(path)
    # The version is what makes vLLM take itself for a CPU build.
    version_file = tree / "vllm" / "_version.py"
    version_file.write_bytes((installed / "_version.py").read_bytes())


def apply(patch: Patch, tree: Path, *part: str) -> None:
    """Apply a patch to the tree, or with git's --include or --exclude a part of it."""
    result = git.run(tree, ["apply", *part, "-"], input_bytes=patch.data)
    if result.returncode:
        raise PdError(
            f"{patch.name}: does not apply: {git.complaint(result)}",
            next_step="run pdlaunch patch check first",
        )


def pytest_command(engine: Engine, arguments: Sequence[str]) -> list[str]:
    return [str(engine.python), "-m", "pytest", "-p", "no:cacheprovider", "-q", *arguments]


def environment(tree: Path, tools: Path) -> dict[str, str]:
    """For tests in the tree: its vllm comes before the engine's, in child processes too."""
    return engine_install.clean_environment() | {
        "HF_HOME": str(_hub_cache(tools)),
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": os.pathsep.join((str(tree), str(tools))),
        "VLLM_NO_USAGE_STATS": "1",
    }


def ensure_test_tools(engine: Engine, reporter: Reporter) -> Path:
    """pytest and its plugins, in a folder beside the engine's packages, not among them."""
    packages = packages_of(engine)
    content = json.dumps([_TEST_TOOLS, _RAY, _MODEL_CONFIGS])
    # Another content is another folder: tests may be running on this one.
    tools = packages / f"test-tools-{hashlib.sha256(content.encode()).hexdigest()[:8]}"
    done = tools / ".complete"
    with FileLock(packages / ".test-tools.lock"):
        if not done.exists():
            shutil.rmtree(tools, ignore_errors=True)
            with reporter.work("installing pytest for upstream's tests"):
                _install(packages, tools)
            (tools / "ray.py").write_text(_RAY, encoding="utf-8")
            _write_model_configs(_hub_cache(tools))
            done.touch()
    return tools


def _install(packages: Path, tools: Path) -> None:
    command = ["-m", "pip", "install", "--upgrade", "--target", str(tools)]
    result = subprocess.run(
        [str(packages / "bin" / "python"), *command, *_TEST_TOOLS],
        capture_output=True,
        text=True,
        check=False,
        env=engine_install.clean_environment(),
    )
    if result.returncode:
        raise PdError(
            f"cannot install pytest: {result.stderr.strip().splitlines()[-1]}",
            where=str(tools),
            next_step="see where pip looks: pip config list",
        )


def _hub_cache(tools: Path) -> Path:
    return tools / "hub-cache"


def _write_model_configs(home: Path) -> None:
    """Model configurations in the form of a cache that the hub's client filled."""
    for model, config in _MODEL_CONFIGS.items():
        folder = home / "hub" / f"models--{model.replace('/', '--')}"
        commit = hashlib.sha1(model.encode(), usedforsecurity=False).hexdigest()
        snapshot = folder / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps(config), encoding="utf-8")
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(commit, encoding="utf-8")
