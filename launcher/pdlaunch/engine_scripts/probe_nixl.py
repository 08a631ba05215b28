"""Finds out whether NIXL's backends really instantiate. A plain script, for the engine's Python.

Says what it knows as it goes, one JSON object a line: it may crash or hang in a library.
"""

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

_FABRIC_PLUGIN = "libplugin_LIBFABRIC.so"


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def main(backends: list[str]) -> None:
    names = {
        str(each.metadata["Name"]).lower().replace("_", "-") for each in metadata.distributions()
    }
    builds = sorted(name for name in names if name.startswith("nixl-cu"))
    say(torch=version("torch"), nixl=version("nixl"), builds=builds)

    import torch  # noqa: PLC0415 - what was said so far is kept if it cannot

    say(cuda=torch.version.cuda)
    if torch.version.cuda:
        say(cuda_problem=cuda_problem(torch))

    # As the engine does: NIXL picks its build by what is imported already.
    from nixl._api import nixl_agent, nixl_agent_config  # noqa: PLC0415

    for plugin in fabric_plugins(builds):
        ldd = subprocess.run(["ldd", str(plugin)], capture_output=True, text=True, check=False)
        loaded = Path("/proc/self/maps").read_text(encoding="utf-8")
        libraries = "\n".join(line for line in loaded.splitlines() if ".so" in line)
        say(fabric_libraries=ldd.stdout + ldd.stderr, loaded=libraries + "\n")

    for backend in backends:
        say(trying=backend)
        # The engine leaves NIXL's threads off as well.
        agent = nixl_agent("doctor", nixl_agent_config(enable_prog_thread=False, backends=[]))
        say(plugins=sorted(agent.get_plugin_list()))
        try:
            agent.create_backend(backend)
            error = None
        except Exception as failure:
            error = str(failure) or type(failure).__name__
        say(backend=backend, error=error)


def cuda_problem(torch: Any) -> str | None:
    """What keeps a device from computing: the driver, or what a container left out."""
    try:
        torch.zeros(1, device="cuda")
    except Exception as failure:
        return str(failure).strip().partition("\n")[0] or type(failure).__name__
    return None


def fabric_plugins(builds: list[str]) -> list[Path]:
    return [
        Path(str(file.locate()))
        for build in builds
        for file in metadata.distribution(build).files or []
        if file.name == _FABRIC_PLUGIN
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
