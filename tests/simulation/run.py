"""Runs many random histories of the streaming push simulator that the patches add.

The simulator drives the patched state machines, without engines: a history takes about a
millisecond. It runs in the patched source tree over an engine's compiled files, on all cores; a
history that breaks an invariant is shrunk and told. Options that are not listed here go to the
simulator, such as --replay SEED or --mutant NAME.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from pdlaunch import engine, overlay
from pdlaunch.console import Terminal
from pdlaunch.errors import PdError
from pdlaunch.series import load as load_series

SIMULATOR = Path("tests/v1/kv_connector/unit/nixl_streaming_simulator.py")
HISTORIES = 1_000_000


def main() -> int:
    options, passed_on = _arguments()
    # The simulator's processes are in this one's group: whoever interrupts reaches all.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    terminal = Terminal()
    try:
        with tempfile.TemporaryDirectory(prefix="pdlaunch-simulation-") as tmp:
            cpu = engine.ensure("cpu", terminal)
            tools = overlay.ensure_test_tools(cpu, terminal)
            tree = Path(tmp) / "vllm"
            _lay_out(tree, options.tree, cpu, terminal)
            if not (tree / SIMULATOR).is_file():
                raise PdError("the tree has no simulator", where=str(SIMULATOR))
            command = [
                str(cpu.python),
                SIMULATOR.name,
                f"--histories={options.histories}",
                f"--jobs={options.jobs}",
                *passed_on,
            ]
            terminal.status(f"{options.histories} histories, {options.jobs} at a time")
            return subprocess.run(
                command,
                cwd=(tree / SIMULATOR).parent,
                env=overlay.environment(tree, tools) | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                check=False,
            ).returncode
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except PdError as error:
        terminal.error(error)
        return error.exit_code


def _arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--histories", type=int, default=HISTORIES)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--tree",
        type=Path,
        help="a checkout of the patched vLLM to take instead of the shipped series",
    )
    return parser.parse_known_args()


def _lay_out(tree: Path, checkout: Path | None, cpu: engine.Engine, terminal: Terminal) -> None:
    """Make a tree of the patched source that finds the engine's compiled files."""
    series = load_series()
    overlay.lay_out(tree, series.upstream, cpu, terminal)
    if checkout is None:
        for patch in series.patches:
            overlay.apply(patch, tree)
        return
    if not (checkout / SIMULATOR).is_file():
        raise PdError(f"{checkout} has no simulator", where=str(SIMULATOR))
    for folder in ("vllm", str(SIMULATOR.parent)):
        shutil.copytree(
            checkout / folder,
            tree / folder,
            dirs_exist_ok=True,
            # Without the files of the engine's build, which say that it is one for CPU.
            ignore=lambda path, names: [
                name
                for name in names
                if not (name.endswith(".py") or Path(path, name).is_dir())
                or name in ("_version.py", "__pycache__")
            ],
        )


if __name__ == "__main__":
    sys.exit(main())
