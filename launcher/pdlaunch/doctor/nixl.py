"""Tries NIXL in a child process with an engine's environment: a crash or a hang stays there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import IO, Any

from pdlaunch.doctor.facts import NixlProbe

TIMEOUT_S = 120.0
_SCRIPT = "probe_nixl.py"


def probe(
    process: str,
    python: Path,
    backends: Sequence[str],
    environment: Mapping[str, str],
    timeout_s: float = TIMEOUT_S,
) -> NixlProbe:
    """What NIXL says there, backend by backend, as far as the child came."""
    script = Path(str(files("pdlaunch.engine_scripts").joinpath(_SCRIPT)))
    # Files, for a pipe that a grandchild holds open would outlast the child.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as complaints:
        problem = _run(
            [str(python), "-I", str(script), *backends], environment, output, complaints, timeout_s
        )
        lines = _lines(output)
        said = [line for line in _lines(complaints) if line.strip()]
    found = _merged(lines)
    trying: str = found.get("trying", "")
    outcomes: dict[str, str | None] = dict(found.get("backends", {}))
    if problem is not None and trying in backends and trying not in outcomes:
        outcomes[trying] = problem
    elif problem is not None and said:
        problem = f"{problem}: {said[-1].strip()[:200]}"
    return NixlProbe(
        process=process,
        wanted=tuple(backends),
        torch=found.get("torch"),
        cuda=found.get("cuda"),
        cuda_problem=found.get("cuda_problem"),
        nixl=found.get("nixl"),
        builds=tuple(found.get("builds", ())),
        plugins=tuple(found.get("plugins", ())),
        backends=outcomes,
        fabric_libraries=found.get("fabric_libraries", ""),
        loaded=found.get("loaded", ""),
        problem=problem,
    )


def _run(
    argv: Sequence[str],
    environment: Mapping[str, str],
    output: IO[bytes],
    complaints: IO[bytes],
    timeout_s: float,
) -> str | None:
    try:
        child = subprocess.Popen(
            argv,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=complaints,
            start_new_session=True,
        )
    except OSError as error:
        return f"{argv[0]} cannot be run: {error.strerror or error}"
    try:
        code = child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return f"it hung: no end within {timeout_s:g} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if code < 0:
        return f"it crashed: {signal.Signals(-code).name}"
    return f"it ended with code {code}" if code else None


def _lines(file: IO[bytes]) -> list[str]:
    file.seek(0)
    return file.read().decode("utf-8", "replace").splitlines()


def _merged(lines: Sequence[str]) -> dict[str, Any]:
    """The script says what it knows line by line, between what libraries print."""
    found: dict[str, Any] = {}
    backends: dict[str, str | None] = {}
    for line in lines:
        if not line.startswith("{"):
            continue
        with suppress(ValueError):
            piece = json.loads(line)
            if "backend" in piece:
                backends[piece["backend"]] = piece["error"]
            else:
                found |= piece
    return found | {"backends": backends}
