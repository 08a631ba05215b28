"""Shows that what the image is made of fits together. A plain script, run inside the image.

Needs no GPU: the driver comes from the host, so its libcuda.so.1 is the one library that may be
missing. Prints what it found as JSON; what is wrong goes to stderr, one line each, and exits 1.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

EFA_LIBRARIES = Path("/opt/amazon/efa/lib")
PROGRAMS = ("vllm", "vllm-router")
_NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
# What a deployment imports: the connector brings in both of its sides.
MODULES = ("torch", "vllm", f"{_NIXL}.streaming.worker", f"{_NIXL}.connector", "nixl")
FABRIC_PLUGIN = "libplugin_LIBFABRIC.so"
_FROM_THE_HOST = "libcuda.so.1"


@dataclass
class Found:
    """What is here, and what is wrong with it."""

    versions: dict[str, str] = field(default_factory=dict)
    nixl_builds: list[str] = field(default_factory=list)
    libfabric: str | None = None
    problems: list[str] = field(default_factory=list)


def main() -> None:
    options = _options()
    found = Found()
    for module in MODULES:
        try:
            importlib.import_module(module)
        except Exception as error:  # whatever it is, the next check may tell more
            found.problems.append(f"cannot import {module}: {type(error).__name__}: {error}")
    found.versions = _versions("vllm", "torch", "nixl", "vllm-router")
    found.nixl_builds = sorted(name for name in _installed() if name.startswith("nixl-cu"))
    found.problems += version_problems(options.version, found.versions, sys.modules.get("vllm"))
    found.problems += nixl_problems(cuda_major(), found.nixl_builds)
    if not options.without_efa:
        found.libfabric, problems = fabric(found.nixl_builds)
        found.problems += problems
    folder = Path(sys.executable).parent
    for name in PROGRAMS:
        if not (shutil.which(name) or os.access(folder / name, os.X_OK)):
            found.problems.append(f"there is no program {name}")
    print(json.dumps(asdict(found), indent=2))
    for problem in found.problems:
        print(f"verify_image: {problem}", file=sys.stderr)
    sys.exit(bool(found.problems))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--version", help="the version that vLLM must have")
    parser.add_argument(
        "--without-efa", action="store_true", help="do not look for EFA's libraries"
    )
    return parser.parse_args()


def version_problems(
    wanted: str | None, versions: Mapping[str, str], vllm: object
) -> Iterator[str]:
    """The patched build, and no other, must be what is installed and what is imported."""
    stated = versions.get("vllm")
    imported = getattr(vllm, "__version__", None)
    if stated is None:
        yield "vllm is not installed"
        return
    if ".pd." not in stated.replace("+", "."):
        yield f"vllm {stated} is not a patched build"
    if wanted is not None and stated != wanted:
        yield f"vllm is {stated}, the image is for {wanted}"
    if imported is not None and imported != stated:
        yield f"vllm says it is {imported}, its metadata say {stated}"


def nixl_problems(major: str | None, builds: list[str]) -> Iterator[str]:
    """One build of NIXL, for the CUDA that torch was built for; any one beside CPU torch."""
    wanted = f"nixl-cu{major}"
    if len(builds) != 1:
        yield f"one build of NIXL is needed, found {', '.join(builds) or 'none'}"
    elif major is not None and builds != [wanted]:
        yield f"torch is built for CUDA {major} and NIXL is {builds[0]}: {wanted} is needed"


def cuda_major() -> str | None:
    """The CUDA major of torch; None for a CPU build."""
    version = getattr(sys.modules.get("torch"), "version", None)
    cuda = getattr(version, "cuda", None)
    return str(cuda).partition(".")[0] if cuda else None


def fabric(builds: list[str]) -> tuple[str | None, list[str]]:
    """The libfabric that NIXL's plugin for EFA would load, and what keeps it from loading."""
    plugins = [path for build in builds for path in _files(build) if path.name == FABRIC_PLUGIN]
    if not plugins:
        return None, [f"NIXL has no {FABRIC_PLUGIN}"]
    resolved = subprocess.run(["ldd", str(plugins[0])], capture_output=True, text=True, check=False)
    loaded = Path("/proc/self/maps").read_text(encoding="utf-8")
    return plugin_libraries(resolved.stdout + resolved.stderr, loaded)


def plugin_libraries(ldd: str, loaded: str) -> tuple[str | None, list[str]]:
    """What `ldd` says about the plugin: its libfabric, and what it lacks.

    What this process has loaded is not missing: torch brings some of CUDA's libraries itself.
    """
    libfabric: str | None = None
    problems = []
    for line in map(str.strip, ldd.splitlines()):
        name, _, rest = line.partition(" => ")
        if rest == "not found" and name != _FROM_THE_HOST and f"/{name}\n" not in loaded:
            problems.append(f"{FABRIC_PLUGIN} needs {name}, which is not found")
        elif ": version `" in line:
            problems.append(f"{FABRIC_PLUGIN} cannot be loaded: {line}")
        elif name == "libfabric.so.1" and rest != "not found":
            libfabric = rest.rpartition(" (")[0]
    if libfabric is not None and EFA_LIBRARIES not in Path(libfabric).parents:
        problems.append(f"libfabric comes from {libfabric}, not from {EFA_LIBRARIES}")
    return libfabric, problems


def _files(distribution: str) -> list[Path]:
    files = metadata.distribution(distribution).files or []
    return [Path(str(file.locate())) for file in files]


def _installed() -> set[str]:
    return {each.metadata["Name"].lower().replace("_", "-") for each in metadata.distributions()}


def _versions(*names: str) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    main()
