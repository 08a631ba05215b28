"""Fills the two layers of an engine with pip: the packages it needs, and the patched vLLM.

The packages are gigabytes and minutes and the same for every series; vLLM is seconds. pip runs
in a subprocess, phase by phase, its output in a log.
"""

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
from packaging.specifiers import SpecifierSet

from pdlaunch.console import Reporter
from pdlaunch.errors import PdError
from pdlaunch.upstream import Variant

_NIXL = "1.5.1"
ROUTER = "vllm-router>=0.1.17,<0.2"
# What transformers needs to convert the embedded model.
_CONVERTERS = ("accelerate>=1,<2", "gguf>=0.17,<1")

TOOLS = (f"nixl=={_NIXL}", ROUTER, *_CONVERTERS)

# Where PyTorch's CPU builds come from when pip's own sources don't have them.
_TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def log_file(root: Path) -> Path:
    return root / "install.log"


def install_packages(root: Path, variant: Variant, wheel: Path, reporter: Reporter) -> None:
    """Makes an environment of all that vLLM needs, and of NIXL, the router and the tools."""
    _create(root)
    pip = _Pip(root, reporter)
    torch, others = _requirements(wheel, variant)
    _install_torch(pip, torch, variant)
    pip.install("installing what vLLM needs", others)
    # The meta package asks for the builds of both CUDA majors: gigabytes, for one that is used.
    build = f"nixl-cu{_cuda_major(root)}=={_NIXL}"
    pip.install(f"installing {build}", [build])
    pip.install(f"installing nixl {_NIXL}", ["--no-deps", f"nixl=={_NIXL}"])
    pip.install("installing the router and tools", [ROUTER, *_CONVERTERS])


def install_router(root: Path, reporter: Reporter) -> None:
    """Makes an environment of the router alone."""
    _create(root)
    _Pip(root, reporter).install("installing the router", [ROUTER])


def install_vllm(root: Path, packages: Path, wheel: Path, reporter: Reporter) -> None:
    """Makes an environment of the patched vLLM alone, on top of one that has its packages."""
    _create(root, "--without-pip")
    hook = f"import site; site.addsitedir({str(site_packages(packages))!r})\n"
    (site_packages(root) / "pdlaunch_packages.pth").write_text(hook, encoding="utf-8")
    # pip itself is one of the packages.
    own = ["--no-deps", "--no-index", str(wheel)]
    _Pip(root, reporter).install(f"installing {wheel.name}", own)
    for program in (packages / "bin").iterdir():
        link = root / "bin" / program.name
        if not program.name.startswith(("python", "pip", "activate")) and not link.exists():
            link.symlink_to(program)


def complaint(python: Path, version: str) -> str | None:
    """What is wrong with an engine; None when it imports and states the right version."""
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


def clean_environment() -> dict[str, str]:
    """Ours, without what would make pip or Python look or install outside the environment."""
    unwanted = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PIP_ROOT")
    kept = {key: value for key, value in os.environ.items() if key not in unwanted}
    return kept | {
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INPUT": "1",
        "PYTHONNOUSERSITE": "1",
    }


class _Pip:
    """pip of one environment."""

    def __init__(self, root: Path, reporter: Reporter) -> None:
        self._command = [str(root / "bin" / "python"), "-m", "pip", "install"]
        self._reporter = reporter
        self._log = log_file(root)

    def install(self, label: str, arguments: Sequence[str]) -> None:
        if not self.try_install(label, arguments):
            raise self.failure(
                label,
                "set PIP_INDEX_URL, PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS to a source that has "
                "it (what pip uses now: pip config list), and run this again",
            )

    def try_install(self, label: str, arguments: Sequence[str]) -> bool:
        with self._reporter.work(label), self._log.open("ab") as log:
            log.write(f"\n== {label}\n".encode())
            log.flush()
            return not subprocess.run(
                [*self._command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                check=False,
                env=clean_environment(),
            ).returncode

    def failure(self, label: str, next_step: str) -> PdError:
        why = self._last_error() or "see the log"
        return PdError(f"{label} failed: {why}", where=str(self._log), next_step=next_step)

    def _last_error(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line for line in lines if line.startswith("ERROR:")]
        return errors[-1].removeprefix("ERROR:").strip()[:300] if errors else ""


def _create(root: Path, *options: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "venv", *options, str(root)],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise PdError(
            f"cannot make a virtual environment: {(result.stdout + result.stderr).strip()[:300]}",
            where=str(root),
            next_step="install Python's venv module (Debian: apt install python3-venv)",
        )


def _install_torch(pip: _Pip, torch: str, variant: Variant) -> None:
    label = f"installing {torch}"
    if variant == "cuda":
        pip.install(label, [torch])
        return
    fallback = ["--retries", "1", "--extra-index-url", _TORCH_CPU_INDEX, torch]
    if pip.try_install(label, [torch]):
        return
    if not pip.try_install(f"{label} from PyTorch's index", fallback):
        raise pip.failure(
            label,
            "fetch it where there is a network: "
            f"pip download --no-deps -d wheels --index-url {_TORCH_CPU_INDEX} {torch}; "
            "then run this again with PIP_FIND_LINKS set to that folder",
        )


def _requirements(wheel: Path, variant: Variant) -> tuple[str, list[str]]:
    """What the wheel's own metadata asks for: torch, and the rest."""
    with ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata, _ = parse_email(archive.read(name))
    wanted = [Requirement(line) for line in metadata.get("requires_dist", [])]
    here = [r for r in wanted if r.marker is None or r.marker.evaluate({"extra": ""})]
    if variant == "cuda":
        for requirement in here:
            requirement.specifier &= _no_cpu_builds(requirement.specifier)
    torch = [f"torch{r.specifier}" for r in here if r.name == "torch"]
    if len(torch) != 1:
        raise PdError("the published wheel does not say which torch it needs", where=str(wheel))
    return torch[0], [str(r) for r in here if r.name != "torch"]


def _no_cpu_builds(specifier: SpecifierSet) -> SpecifierSet:
    """pip takes 1.0+cpu for 1.0, and for the newer of the two where a source has both."""
    pinned = [each.version for each in specifier if each.operator == "=="]
    plain = [version for version in pinned if "+" not in version and "*" not in version]
    return SpecifierSet(",".join(f"!={version}+cpu" for version in plain))


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


def site_packages(root: Path) -> Path:
    return root / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
