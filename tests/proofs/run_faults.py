"""Run the fault tests on our connector and on upstream's, and write docs/faults.md: `make faults`.

Outcomes are kept beside this file, so that one connector, or some tests, can be run by themselves.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from failures import KNOWN, PAIR, RANKS, Known

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "faults"
# Kept with the code: stock is what it is, and its tests take long.
OUTCOMES = {
    "ours": Path(__file__).with_name("outcomes-ours.json"),
    "stock": Path(__file__).with_name("outcomes-stock.json"),
}
PAGE = ROOT / "docs" / "faults.md"
HEAD = """# Known failures, and what becomes of them

Written by `make faults`, which runs every test on our connector and on the push connector that
vLLM 0.32.0 ships, in the same build. Every pair has answered a request from pushed KV before
anything goes wrong, and a test that fails leaves the next one a new pair. "not run": not yet, on
that connector.

| id | what goes wrong | what has to happen | test | stock | ours |
|---|---|---|---|---|---|
"""


def outcomes(connector: str, which: Sequence[str]) -> dict[str, str]:
    """What became of each test function: "passes", or how it failed."""
    report = BUILD / f"{connector}.xml"
    command = [sys.executable, "-m", "pytest", "-m", "fault", PAIR, RANKS, *which]
    command += ["--tb=native", f"--junit-xml={report}"]
    command += ["--stock"] if connector == "stock" else []
    subprocess.run(command, cwd=ROOT, check=False)
    found: dict[str, list[str]] = defaultdict(list)
    for case in ET.parse(report).iter("testcase"):
        name, _, variant = case.get("name", "").partition("[")
        bad = [each for each in case if each.tag in ("failure", "error")]
        for each in bad[:1]:
            reason = each.attrib.get("message", "").splitlines()[0][:160]
            where = f" ({variant.rstrip(']')})" if variant else ""
            found[name].append(f"{reason}{where}")
        found[name] += ["passes"] if not bad and not case.findall("skipped") else []
    return {
        name: "; ".join(reasons)
        if (reasons := [each for each in each_outcome if each != "passes"])
        else "passes"
        for name, each_outcome in found.items()
    }


def row(known: Known, stock: dict[str, str], ours: dict[str, str]) -> str:
    name = f"`{known.test}`"
    if known.patch:
        at_stock, at_ours = "fails without the patch", f"passes with `{known.patch}`"
    elif known.file not in (PAIR, RANKS):
        at_stock, at_ours = "not asked", "passes in `make test`"
    else:
        at_stock, at_ours = told(known.test, stock), told(known.test, ours)
    if known.stock:
        at_stock += f"; {known.stock}"
    cells = (known.id, known.what, known.right, name, at_stock, at_ours)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def told(test: str, outcomes: dict[str, str]) -> str:
    found = outcomes.get(test)
    if found is None:
        return "not run"
    return found if found == "passes" else f"fails: {found}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", choices=("ours", "stock"), help="run one connector, take the other's outcomes"
    )
    parser.add_argument("-k", metavar="EXPRESSION", help="run some of the tests, as pytest's -k")
    arguments = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    results = {}
    for connector, kept in OUTCOMES.items():
        results[connector] = json.loads(kept.read_text("utf-8")) if kept.exists() else {}
        if arguments.only in (None, connector):
            which = ["-k", arguments.k] if arguments.k else []
            results[connector] |= outcomes(connector, which)
            kept.write_text(json.dumps(results[connector], indent=1) + "\n", "utf-8")
    rows = [row(known, results["stock"], results["ours"]) for known in KNOWN]
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(HEAD + "\n".join(rows) + "\n", "utf-8")
    print(f"written: {PAGE.relative_to(ROOT)}")
    wrong = [name for name, outcome in results["ours"].items() if outcome != "passes"]
    print("\n".join(f"ours fails: {name}" for name in wrong) or "ours passes all")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
