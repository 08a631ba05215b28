"""Runs vLLM's own connector and scheduler tests on the stock build and on the patched one.

What passes on the stock build must pass on the patched one; tests that cannot run on this
machine (no GPU, no weights) fail on both and prove nothing either way. The tests are those of
the source distribution, without the changes that patches make to them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from pdlaunch import engine, overlay
from pdlaunch.console import Terminal
from pdlaunch.errors import PdError
from pdlaunch.series import load as load_series

FILES = ("tests/v1/kv_connector/unit/test_*.py", "tests/v1/core/test_*.py")
# Connectors of other projects: their tests take long and touch nothing that the series touches.
OTHERS = ("flexkv", "hf3fs", "lmcache", "mooncake", "moriio")
PLUGIN = Path(__file__).resolve().parent / "plugin" / "frozen_heap.py"
TEST_LIMIT_S = 300
# pytest's exit codes for a run to the end, whatever its tests did.
RAN = (0, 1)
PASSED = "passed"
# Process groups of pytest, for whoever interrupts.
RUNNING: set[int] = set()
STOPPED = threading.Event()


@dataclass(frozen=True)
class Build:
    """One vLLM to test: the tree's own `vllm` comes first where it has one."""

    name: str
    tree: Path
    engine: engine.Engine
    tools: Path
    logs: Path

    def run(self, selection: Sequence[str], label: str) -> tuple[dict[str, str], bool]:
        """Outcomes by node id, and whether pytest came to its end."""
        self.logs.mkdir(parents=True, exist_ok=True)
        report = self.logs / f"{self.name}-{label}.xml"
        report.unlink(missing_ok=True)
        options = [
            "-p",
            PLUGIN.stem,
            f"--junitxml={report}",
            "--continue-on-collection-errors",
            f"--timeout={TEST_LIMIT_S}",
            "--tb=short",
            "-o",
            "junit_family=xunit1",
            "-o",
            "junit_logging=no",
        ]
        environment = overlay.environment(self.tree, self.tools)
        with report.with_suffix(".log").open("wb") as log:
            # A session of its own: tests may leave engines behind.
            process = subprocess.Popen(
                overlay.pytest_command(self.engine, [*options, *selection]),
                cwd=self.tree,
                env=environment
                | {
                    "PYTHONPATH": os.pathsep.join((environment["PYTHONPATH"], str(PLUGIN.parent))),
                    # Runs share the cores: more threads than cores make every test slower.
                    "OMP_NUM_THREADS": "1",
                    "VLLM_CPU_KVCACHE_SPACE": "1",
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            RUNNING.add(process.pid)
            try:
                if STOPPED.is_set():
                    _end_group(process.pid)
                code = process.wait()
            finally:
                _end_group(process.pid)
                RUNNING.discard(process.pid)
        return _outcomes(report), code in RAN and report.is_file()


@dataclass
class Tally:
    """All outcomes of one build."""

    build: Build
    outcomes: dict[str, str] = field(default_factory=dict)
    crashed: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def passed(self) -> set[str]:
        return {test for test, outcome in self.outcomes.items() if outcome == PASSED}

    def line(self) -> str:
        counts = Counter(self.outcomes.values())
        parts = [f"{counts[each]} {each}" for each in (PASSED, "failed", "error", "skipped")]
        crashed = f", {len(self.crashed)} files crashed" if self.crashed else ""
        return f"{self.build.name:8} {', '.join(parts)}{crashed}"


def main() -> int:
    options = _arguments()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    terminal = Terminal()
    started = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="pdlaunch-upstream-") as tmp:
            stock, patched = _builds(Path(tmp), options.logs, terminal)
            files = options.files or _files(stock.tree)
            terminal.status(f"{len(files)} files, {options.jobs} at a time, logs in {options.logs}")
            tallies = [Tally(stock), Tally(patched)]
            saved = options.logs / "stock.json"
            if options.reuse_stock:
                tallies[0].outcomes = json.loads(saved.read_text(encoding="utf-8"))
            else:
                _run_all(tallies[0], files, options.jobs, terminal)
                saved.write_text(json.dumps(tallies[0].outcomes, indent=1), encoding="utf-8")
            _run_all(tallies[1], files, options.jobs, terminal)
            lost, flaky = _compare(tallies[0], tallies[1], terminal)
    except PdError as error:
        terminal.error(error)
        return error.exit_code
    for tally in tallies:
        terminal.data(tally.line())
    _by_file(tallies, terminal)
    for test in sorted(flaky):
        terminal.data(f"flaky: {test}")
    for test in sorted(lost):
        terminal.data(f"passes on stock only: {test}")
    terminal.status(f"{time.monotonic() - started:.0f} s")
    if not tallies[0].passed():
        terminal.data("nothing passed on stock: the comparison shows nothing")
        return 1
    return 1 if lost else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", help="paths in vLLM's tree (default: all of interest)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--logs", type=Path, default=Path("build/upstream-tests"))
    parser.add_argument(
        "--reuse-stock", action="store_true", help="take the stock outcomes of the last run"
    )
    options = parser.parse_args()
    options.logs = options.logs.resolve()
    options.logs.mkdir(parents=True, exist_ok=True)
    return options


def _builds(folder: Path, logs: Path, terminal: Terminal) -> tuple[Build, Build]:
    cpu = engine.ensure("cpu", terminal)
    tools = overlay.ensure_test_tools(cpu, terminal)
    stock, patched = folder / "stock", folder / "patched"
    overlay.lay_out(stock, load_series().upstream, cpu, terminal)
    # Without a `vllm` of its own this tree runs on the engine's, the wheel as it was built.
    shutil.copytree(stock / "tests", patched / "tests", copy_function=os.link)
    shutil.copy2(stock / "pyproject.toml", patched)
    return (
        Build("stock", stock, cpu, tools, logs),
        Build("patched", patched, cpu, tools, logs),
    )


def _files(tree: Path) -> list[str]:
    found = {path for pattern in FILES for path in tree.glob(pattern)}
    wanted = [path for path in found if not any(other in path.name for other in OTHERS)]
    return sorted(str(path.relative_to(tree)) for path in wanted)


def _run_all(tally: Tally, files: Sequence[str], jobs: int, terminal: Terminal) -> None:
    started = time.monotonic()
    chunks = _chunks(tally.build.tree, files, jobs)
    with terminal.work(f"{tally.build.name}: running"), ThreadPoolExecutor(jobs) as pool:
        results = list(
            pool.map(lambda item: tally.build.run(item[1], f"{item[0]}"), enumerate(chunks))
        )
        # One file that takes its process down must not hide what the others do.
        again = [
            each
            for (_, ended), chunk in zip(results, chunks, strict=True)
            if not ended
            for each in chunk
        ]
        for outcomes, ended in results:
            if ended:
                tally.outcomes |= outcomes
        names = [Path(each).stem for each in again]
        alone = list(
            pool.map(
                lambda item: tally.build.run([item[0]], item[1]), zip(again, names, strict=True)
            )
        )
    for file, (outcomes, ended) in zip(again, alone, strict=True):
        tally.outcomes |= outcomes
        if not ended:
            tally.crashed.append(file)
    tally.seconds = time.monotonic() - started
    terminal.status(f"{tally.line()}, {tally.seconds:.0f} s")


def _chunks(tree: Path, files: Sequence[str], count: int) -> list[list[str]]:
    """Files spread over processes by size: starting one costs as much as many tests."""
    chunks: list[list[str]] = [[] for _ in range(min(count, len(files)))]
    sizes = [0] * len(chunks)
    for file in sorted(files, key=lambda file: -(tree / file).stat().st_size):
        least = sizes.index(min(sizes))
        chunks[least].append(file)
        sizes[least] += (tree / file).stat().st_size
    return chunks


def _compare(stock: Tally, patched: Tally, terminal: Terminal) -> tuple[set[str], set[str]]:
    """Tests that the patches break, and tests whose outcome is a matter of luck."""
    suspects = stock.passed() - patched.passed()
    if not suspects:
        return set(), set()
    with terminal.work(f"running {len(suspects)} again on both"):
        again = {
            tally.build.name: tally.build.run(sorted(suspects), "again")[0]
            for tally in (stock, patched)
        }
    lost = {
        test
        for test in suspects
        if again["stock"].get(test) == PASSED and again["patched"].get(test) != PASSED
    }
    return lost, suspects - lost


def _by_file(tallies: Iterable[Tally], terminal: Terminal) -> None:
    counts = [Counter(test.partition("::")[0] for test in tally.passed()) for tally in tallies]
    for file in sorted(set().union(*counts)):
        terminal.data("  ".join(f"{count[file]:4}" for count in counts) + f"  {file}")


def _outcomes(report: Path) -> dict[str, str]:
    if not report.is_file():
        return {}
    outcomes: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        if "file" not in case.attrib:
            continue  # a file that cannot be imported has no tests
        tags = {child.tag for child in case}
        outcome = next((tag for tag in ("error", "failure", "skipped") if tag in tags), PASSED)
        test = _node_id(case.attrib)
        # A test that passed and whose teardown failed is reported twice.
        if outcomes.get(test, PASSED) == PASSED:
            outcomes[test] = "failed" if outcome == "failure" else outcome
    return outcomes


def _node_id(case: Mapping[str, str]) -> str:
    file = case["file"]
    module = file.removesuffix(".py").replace("/", ".")
    classes = case.get("classname", "").removeprefix(module).strip(".")
    return "::".join([file, *(classes.split(".") if classes else ()), case["name"]])


def _stop(number: int, _frame: object) -> None:
    """Leaves nothing running: threads that wait for pytest see it end."""
    STOPPED.set()
    for group in tuple(RUNNING):
        _end_group(group)
    sys.exit(128 + number)


def _end_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
