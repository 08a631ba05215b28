"""Fills an engine environment: pip in a subprocess, phase by phase, its output in a log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from zipfile import ZipFile

from packaging.metadata import parse_email
from packaging.requirements import Requirement

from pdlaunch.console import Reporter
from pdlaunch.errors import PdError
from pdlaunch.upstream import Variant

NIXL = "1.5.1"
TOOLS = (
    f"nixl=={NIXL}",
    "vllm-router>=0.1.17,<0.2",
    # The two that transformers needs to convert the embedded model.
    "accelerate>=1,<2",
    "gguf>=0.17,<1",
)

# Where PyTorch's CPU builds come from when pip's own sources don't have them.
_TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def log_file(root: Path) -> Path:
    return root / "install.log"


def install(root: Path, variant: Variant, wheel: Path, reporter: Reporter) -> None:
    """Makes the virtual environment and installs torch, the patched wheel, NIXL and the tools."""
    root.mkdir(parents=True)
    _create(root)
    pip = _Pip(root, reporter)
    torch = _torch_requirement(wheel)
    _install_torch(pip, torch, variant)
    pip.install(f"installing {wheel.name}", [str(wheel)])
    # The meta package asks for the builds of both CUDA majors: gigabytes, for one that is used.
    build = f"nixl-cu{_cuda_major(root)}=={NIXL}"
    pip.install(f"installing {build}", [build])
    pip.install(f"installing nixl {NIXL}", ["--no-deps", f"nixl=={NIXL}"])
    pip.install("installing the router and tools", [t for t in TOOLS if not t.startswith("nixl")])


def complaint(python: Path, version: str) -> str | None:
    """What is wrong with an environment; None when it imports and states the right version."""
    script = files("pdlaunch.engine_scripts").joinpath("verify_engine.py")
    try:
        result = subprocess.run(
            [python, "-I", str(script)],
            capture_output=True,
            text=True,
            check=False,
            env=clean_environment() | {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
        )
    except OSError as error:
        return str(error)
    if result.returncode:
        return result.stderr.strip().splitlines()[-1] if result.stderr.strip() else "it crashed"
    found = json.loads(result.stdout.splitlines()[-1])["vllm"]
    return None if found == version else f"it holds vllm {found} instead of {version}"


class _Pip:
    """pip of one environment."""

    def __init__(self, root: Path, reporter: Reporter) -> None:
        self._root = root
        self._reporter = reporter

    def install(self, label: str, arguments: Sequence[str]) -> None:
        if not self.try_install(label, arguments):
            raise self.failure(label, arguments)

    def try_install(self, label: str, arguments: Sequence[str]) -> bool:
        command = [str(self._root / "bin" / "python"), "-m", "pip", "install", *arguments]
        with self._reporter.work(label), log_file(self._root).open("ab") as log:
            log.write(f"\n== {label}\n".encode())
            log.flush()
            return not subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                check=False,
                env=clean_environment(),
            ).returncode

    def failure(self, label: str, arguments: Sequence[str], hint: str | None = None) -> PdError:
        return PdError(
            f"{label} failed: {self._last_error() or 'see the log'}",
            where=str(log_file(self._root)),
            next_step=hint
            or f"set PIP_INDEX_URL, PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS to a source that has "
            f"{arguments[-1]} (what pip uses now: pip config list), and run this again",
        )

    def _last_error(self) -> str:
        lines = log_file(self._root).read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line for line in lines if line.startswith("ERROR:")]
        return errors[-1].removeprefix("ERROR:").strip()[:300] if errors else ""


def _create(root: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "venv", str(root)], capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise PdError(
            f"cannot make a virtual environment: {(result.stdout + result.stderr).strip()[:300]}",
            where=str(root),
            next_step="install Python's venv module (Debian: apt install python3-venv)",
        )


def _install_torch(pip: _Pip, torch: Requirement, variant: Variant) -> None:
    label = f"installing {torch}"
    if variant == "cuda":
        pip.install(label, [str(torch)])
        return
    fallback = ["--retries", "1", "--extra-index-url", _TORCH_CPU_INDEX, str(torch)]
    if pip.try_install(label, [str(torch)]):
        return
    if not pip.try_install(f"{label} from PyTorch's index", fallback):
        raise pip.failure(
            label,
            [str(torch)],
            hint="fetch it where there is a network, "
            f"pip download --no-deps -d wheels --index-url {_TORCH_CPU_INDEX} {torch}, "
            "and run this again with PIP_FIND_LINKS set to that folder",
        )


def _torch_requirement(wheel: Path) -> Requirement:
    """The torch that the wheel is built against, from its own metadata."""
    with ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata, _ = parse_email(archive.read(name))
    for line in metadata.get("requires_dist", []):
        requirement = Requirement(line)
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if requirement.name == "torch" and wanted:
            requirement.marker = None
            return requirement
    raise PdError("the published wheel does not say which torch it needs", where=str(wheel))


def _cuda_major(root: Path) -> str:
    """The CUDA major that torch was built for; NIXL's build for 12 is the one used on CPU."""
    found = subprocess.run(
        [root / "bin" / "python", "-c", "import torch; print(torch.version.cuda or '')"],
        capture_output=True,
        text=True,
        check=False,
        env=clean_environment(),
    ).stdout.strip()
    return found.partition(".")[0] or "12"


def clean_environment() -> dict[str, str]:
    """Ours, without what would make pip or Python look or install outside the environment."""
    unwanted = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PIP_ROOT")
    kept = {key: value for key, value in os.environ.items() if key not in unwanted}
    return kept | {
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INPUT": "1",
        "PYTHONNOUSERSITE": "1",
    }
