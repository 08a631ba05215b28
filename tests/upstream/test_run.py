"""The comparison of upstream's tests on two builds: what counts as broken by the patches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import run

REPORT = """<testsuites><testsuite>
<testcase classname="tests.v1.test_a" name="test_plain" file="tests/v1/test_a.py"/>
<testcase classname="tests.v1.test_a.TestIt" name="test_x[1.5-a::b]" file="tests/v1/test_a.py"/>
<testcase classname="tests.v1.test_a" name="bad" file="tests/v1/test_a.py"><failure/></testcase>
<testcase classname="tests.v1.test_a" name="gpu" file="tests/v1/test_a.py"><skipped/></testcase>
<testcase classname="tests.v1.test_a" name="test_left" file="tests/v1/test_a.py"/>
<testcase classname="tests.v1.test_a" name="test_left" file="tests/v1/test_a.py"><error/></testcase>
<testcase time="0.0"><error message="collection failure"/></testcase>
</testsuite></testsuites>"""


class FakeReporter:
    def status(self, message: str) -> None: ...

    def work(self, label: str) -> FakeReporter:
        return self

    def __enter__(self) -> FakeReporter:
        return self

    def __exit__(self, *exc: object) -> None: ...


class FakeBuild:
    def __init__(self, name: str, passes_again: Sequence[str] = ()) -> None:
        self.name = name
        self._passes_again = passes_again

    def run(self, selection: Sequence[str], label: str) -> tuple[dict[str, str], bool]:
        outcomes = {
            test: "passed" if test in self._passes_again else "failed" for test in selection
        }
        return outcomes, True


def tally(build: FakeBuild, passed: Sequence[str], failed: Sequence[str] = ()) -> run.Tally:
    outcomes = dict.fromkeys(passed, "passed") | dict.fromkeys(failed, "failed")
    return run.Tally(build, outcomes)  # type: ignore[arg-type]


def compare(stock: run.Tally, patched: run.Tally) -> tuple[set[str], set[str]]:
    return run._compare(stock, patched, FakeReporter())  # type: ignore[arg-type]


def test_outcomes_are_by_node_id_and_a_failed_teardown_is_no_pass(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)

    assert run._outcomes(report) == {
        "tests/v1/test_a.py::test_plain": "passed",
        "tests/v1/test_a.py::TestIt::test_x[1.5-a::b]": "passed",
        "tests/v1/test_a.py::bad": "failed",
        "tests/v1/test_a.py::gpu": "skipped",
        "tests/v1/test_a.py::test_left": "error",
    }


def test_a_test_that_fails_twice_on_the_patched_build_only_is_lost() -> None:
    stock = tally(FakeBuild("stock", ["t"]), ["t", "u"])
    patched = tally(FakeBuild("patched"), ["u"], ["t"])

    assert compare(stock, patched) == ({"t"}, set())


def test_a_test_that_is_missing_on_the_patched_build_is_lost() -> None:
    stock = tally(FakeBuild("stock", ["t"]), ["t"])

    assert compare(stock, tally(FakeBuild("patched"), [])) == ({"t"}, set())


def test_a_test_that_passes_the_second_time_is_flaky() -> None:
    stock = tally(FakeBuild("stock", ["t"]), ["t"])
    patched = tally(FakeBuild("patched", ["t"]), [], ["t"])

    assert compare(stock, patched) == (set(), {"t"})


def test_a_test_that_then_fails_on_stock_as_well_is_flaky() -> None:
    stock = tally(FakeBuild("stock"), ["t"])
    patched = tally(FakeBuild("patched"), [], ["t"])

    assert compare(stock, patched) == (set(), {"t"})


def test_tests_that_fail_on_both_builds_prove_nothing() -> None:
    stock = tally(FakeBuild("stock"), ["u"], ["t"])

    assert compare(stock, tally(FakeBuild("patched"), ["u"], ["t"])) == (set(), set())


def test_every_file_is_in_one_chunk(tmp_path: Path) -> None:
    files = []
    for number in range(7):
        (tmp_path / f"test_{number}.py").write_text("#" * number * 100)
        files.append(f"test_{number}.py")

    chunks = run._chunks(tmp_path, files, 3)

    assert len(chunks) == 3
    assert sorted(file for chunk in chunks for file in chunk) == files
