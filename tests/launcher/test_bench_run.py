"""`pdlaunch bench` with fake engines and a fake client: everything in between is real."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launching import Launcher, fake_processes, leftover_files, until
from pdlaunch import deployments
from pdlaunch.bench import counters, link, run
from pdlaunch.bench.results import Request, Results
from pdlaunch.bench.workload import Load, select
from pdlaunch.plan import DeploymentPlan

TEXT = "Paris"
RECORDED = Path(__file__).with_name("bench_results.json")


class FakeClient:
    """Answers every request at once, and differently where it is told to."""

    def __init__(self, wrong: str = "", fails: str = "", hangs: str = "") -> None:
        self.wrong = wrong
        self.fails = fails
        self.hangs = hangs
        self.pid = os.getpid()
        # Gets a line for everything sent; the command runs in a process of its own.
        self.sent: Path | None = None

    async def run(
        self, load: Load, url: str, plan: DeploymentPlan, **_: object
    ) -> tuple[float, list[Request]]:
        if plan.name == self.hangs:
            await asyncio.sleep(600)
        if self.sent is not None:
            with self.sent.open("a") as file:
                file.write(f"{plan.name} {load.prompt_tokens} {load.answer_tokens}\n")
        text = "London" if plan.name == self.wrong else TEXT
        error = "Internal Server Error" if plan.name == self.fails else ""
        one = Request(
            ttft_s=0.2,
            latency_s=0.2 + 0.01 * (load.answer_tokens - 1),
            itl_s=(0.01,) * (load.answer_tokens - 1),
            answer_tokens=load.answer_tokens,
            text=text,
            error=error,
        )
        return 1.0, [one] * load.requests

    async def prompts(self, load: Load, plan: DeploymentPlan, *, seed: int) -> list[list[int]]:
        return [[seed, number] for number in range(load.requests)]


@pytest.fixture
def fake_client(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    made = FakeClient()

    @contextmanager
    def client(*_: object) -> Iterator[FakeClient]:
        yield made

    monkeypatch.setattr(run, "client", client)
    monkeypatch.setattr(run, "_SETTLE_S", 0.0)
    monkeypatch.setattr(run, "_IDLE_S", 0.2)
    monkeypatch.setattr(counters, "_SETTLED_WITHIN_S", 0.0)
    return made


@pytest.fixture(autouse=True)
def nothing_is_left(launcher: Launcher) -> object:
    yield
    assert until(lambda: not fake_processes()), fake_processes()
    assert until(lambda: not leftover_files()), leftover_files()
    assert deployments.names() == []


def bench(launcher: Launcher, *options: str) -> list[str]:
    return ["bench", launcher.recipe("a"), "--quick", "--workload", "short", *options]


def test_all_modes_and_one_engine_are_measured_and_reported(
    launcher: Launcher, fake_client: FakeClient, tmp_path: Path
) -> None:
    data, page = tmp_path / "a.json", tmp_path / "a.html"
    command = bench(launcher, "--json", str(data), "--html", str(page))
    code, out, err = launcher.run(*command)
    assert code == 0, err
    found = Results.model_validate_json(data.read_text())
    measured = [(one.round, one.subject, one.beside) for one in found.measurements]
    alone = [("floor", None), ("one-engine", None)]
    pairs = [
        each
        for mode in ("pull", "push-upstream", "push")
        for each in (("floor", mode), (mode, None), ("floor", mode))
    ]
    assert measured == [
        *((0, *each) for each in (*alone, *pairs)),
        *((1, *each) for each in (*pairs, *alone)),
    ]
    assert [each.subject for each in found.idle[:4]] == [
        *("one-engine", "pull", "push-upstream", "push")
    ]
    assert set(found.idle[1].cpu_s) == {"prefill", "decode", "router"}
    assert "others' cores" in out
    assert found.differences == ()
    assert "48 answers of P/D compared with one engine's: the same" in err
    assert "push over the others" in out and "short x1" in out
    assert page.read_text().startswith("<!doctype html>")


def test_an_answer_that_one_engine_does_not_give_is_an_error(
    launcher: Launcher, fake_client: FakeClient, tmp_path: Path
) -> None:
    fake_client.wrong = "bench-pull"
    data, page = tmp_path / "a.json", tmp_path / "a.html"
    command = bench(launcher, "--rounds", "1", "--json", str(data), "--html", str(page))
    code, out, err = launcher.run(*command)
    assert code == 1
    assert "8 answers of P/D are not those of one engine" in err
    assert "pull, short x1, round 1, request 0: 'London' instead of 'Paris'" in err
    # What was measured is there all the same.
    assert "push over the others" in out
    assert len(Results.model_validate_json(data.read_text()).differences) == 8
    assert "Do not trust these figures" in page.read_text()


def test_a_close_call_is_told_and_is_no_error(
    launcher: Launcher, fake_client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_client.wrong = "bench-pull"
    monkeypatch.setenv("FAKE_ENGINE", "close_call")
    code, _, err = launcher.run(*bench(launcher, "--rounds", "1", "--modes", "pull"))
    assert code == 0, err
    assert "8 answers part from one engine's" in err and "closer than rounding" in err


@pytest.mark.parametrize(
    ("workload", "caches_for_the_floor"), [("next-turn", True), ("decode-hit", False)]
)
def test_the_floor_has_what_prefill_has_cached(
    launcher: Launcher,
    fake_client: FakeClient,
    workload: str,
    caches_for_the_floor: bool,
    tmp_path: Path,
) -> None:
    fake_client.sent = tmp_path / "sent"
    recipe = launcher.recipe("a")
    command = ["bench", recipe, "--rounds", "1", "--modes", "push", "--workload", workload]
    code, _, err = launcher.run(*command)
    assert code == 0, err
    (load,) = select([workload], quick=False)
    begun, asked = f"{load.cached_tokens} 1", f"{load.prompt_tokens} {load.answer_tokens}"
    floor = [begun] * caches_for_the_floor + [f"{load.prompt_tokens} 1"]
    # Each is warmed up first.
    assert fake_client.sent.read_text().splitlines() == [
        *(f"bench-one-engine {each}" for each in (asked, *floor, begun, asked)),
        *(f"bench-push {each}" for each in (asked, *floor, begun, asked, *floor)),
    ]


def test_caches_are_scattered_once_and_decodes_run_beside_the_load(
    launcher: Launcher, fake_client: FakeClient, tmp_path: Path
) -> None:
    data = tmp_path / "a.json"
    command = ["bench", launcher.recipe("a"), "--rounds", "1", "--modes", "push"]
    command += ["--workload", "scattered", "--json", str(data)]
    code, out, err = launcher.run(*command)
    assert code == 0, err
    for name in ("engine", "prefill-0", "decode-0"):
        assert err.count(f"scattering the 100 blocks of {name}") == 1
    found = Results.model_validate_json(data.read_text())
    assert {load.setup.name for load in found.loads.values()} == {"contiguous blocks in push"}
    for one in found.measurements:
        assert (one.running_tpot_s is None) == (one.subject == "floor")
    assert "TPOT of running decodes" in out


def test_a_pair_over_a_slow_link_has_its_own_deployment_and_is_watched_while_it_waits(
    launcher: Launcher,
    fake_client: FakeClient,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    if (reason := link.refusal()) is not None:
        pytest.skip(reason)
    monkeypatch.setattr(run, "_CRAWL_SETTLE_S", 0.0)
    monkeypatch.setattr(run, "_CRAWL_S", 0.2)
    monkeypatch.setenv("FAKE_ENGINE", "slow_decode")
    data = tmp_path / "a.json"
    command = ["bench", launcher.recipe("a"), "--rounds", "1", "--modes", "push"]
    command += ["--workload", "slow-link", "--json", str(data)]
    code, _, err = launcher.run(*command)
    assert code == 0, err
    found = Results.model_validate_json(data.read_text())
    assert [(each.subject, each.is_waiting) for each in found.idle] == [
        *(("one-engine", False), ("push", False), ("push", True))
    ]
    assert len(found.bring_up_s) == 2 and found.left_out == ()


def test_what_cannot_be_measured_here_is_left_out_and_the_rest_is_measured(
    launcher: Launcher, fake_client: FakeClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(link, "refusal", lambda: "no namespaces here")
    data, page = tmp_path / "a.json", tmp_path / "a.html"
    recipe = launcher.recipe("a")
    command = ["bench", recipe, "--rounds", "1", "--modes", "push", "--workload", "drawn"]
    command += ["--workload", "slow-link", "--json", str(data), "--html", str(page)]
    code, out, err = launcher.run(*command)
    assert code == 0, err
    assert "left out: slow-link x1; no namespaces here" in err
    found = Results.model_validate_json(data.read_text())
    assert [each.loads for each in found.left_out] == [("slow-link x1",)]
    assert list(found.loads) == ["drawn x1"]
    assert "Not measured: slow-link x1. no namespaces here." in page.read_text()
    assert "no namespaces here" in out
    code, _, err = launcher.run("bench", recipe, "--workload", "slow-link", "--dry-run")
    assert code == 1 and "no namespaces here" in err


def test_drawn_answers_that_differ_are_wrong_and_nobody_asks_how_close_it_was(
    launcher: Launcher, fake_client: FakeClient
) -> None:
    fake_client.wrong = "bench-pull"
    command = ["bench", launcher.recipe("a"), "--rounds", "1", "--modes", "pull"]
    code, _, err = launcher.run(*command, "--workload", "drawn")
    assert code == 1
    assert "8 answers of P/D are not those of one engine" in err
    assert "asking it how close" not in err


def test_figures_of_an_earlier_run_are_reported_again(launcher: Launcher, tmp_path: Path) -> None:
    page, plot, table = (tmp_path / name for name in ("a.html", "a.svg", "a.md"))
    files = ("--html", str(page), "--svg", str(plot), "--markdown", str(table))
    code, out, err = launcher.run("bench", "--read", str(RECORDED), *files)
    assert code == 0, err
    assert "Bars:" in out and "Bars:" in page.read_text()
    assert plot.read_text().startswith("<svg") and "requests at a time" in plot.read_text()
    assert "| TTFT | short x1 | floor | at most 1.05 |" in table.read_text()
    for options, told in (
        (("--read", str(page)), "no figures of a benchmark"),
        ((), "nothing to measure"),
        (("a", "--read", str(RECORDED)), "a recipe and an earlier run"),
    ):
        code, out, err = launcher.run("bench", *options)
        assert (code, out) == (2, "") and told in err


def test_failed_requests_are_told(launcher: Launcher, fake_client: FakeClient) -> None:
    fake_client.fails = "bench-push"
    code, out, err = launcher.run(*bench(launcher, "--rounds", "1"))
    assert code == 0, err
    # Those of the floors beside them too.
    assert "24 requests failed" in err and "8 of 8" in out


def test_an_engine_that_dies_ends_the_run_with_its_log_and_keeps_what_there_is(
    launcher: Launcher, fake_client: FakeClient, tmp_path: Path
) -> None:
    fake_client.hangs = "bench-push"
    data = tmp_path / "a.json"
    options = ("--modes", "push", "--rounds", "1", "--json", str(data))
    command = launcher.begin(*bench(launcher, *options))
    command.until("KV moved by push")
    record = deployments.read("bench-push")
    assert record is not None
    os.kill(record.pids["decode-0"], signal.SIGKILL)
    assert command.wait() == 137
    assert "decode-0 was killed by SIGKILL" in command.errors.read_text()
    kept = Results.model_validate_json(data.read_text())
    assert [one.subject for one in kept.measurements] == ["floor", "one-engine"]
    assert not kept.is_complete and not kept.is_identical


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_takes_everything_down(
    launcher: Launcher, fake_client: FakeClient, number: signal.Signals
) -> None:
    fake_client.hangs = "bench-push"
    command = launcher.begin(*bench(launcher, "--modes", "push", "--rounds", "1"))
    command.until("KV moved by push")
    command.kill(number)
    assert command.wait() == 128 + number


def test_nothing_starts_for_what_cannot_be_measured(
    launcher: Launcher, fake_client: FakeClient, tmp_path: Path
) -> None:
    for options, told in (
        (("--modes", "poll"), "no transfer mode 'poll'"),
        (("--workload", "shrot"), "did you mean short?"),
        (("--set", "decode.host=203.0.113.9"), "bench measures on one machine"),
        (("--set", "max_model_len_tokens=100"), "short x1 needs 216 tokens"),
        (("--json", str(tmp_path / "no/such/folder.json")), "cannot write"),
    ):
        code, out, err = launcher.run(*bench(launcher, *options))
        assert (code, out) == (1 if "--json" in options else 2, ""), err
        assert told in err and "starting" not in err


def test_a_dry_run_lists_what_would_be_brought_up(launcher: Launcher) -> None:
    code, out, _ = launcher.run(*bench(launcher, "--dry-run", "--modes", "push,pull"))
    assert code == 0
    title = " ".join(out.split())
    assert title.startswith("6 deployments, about ")
    assert "no round that would end after 10" in title
    lines = [line.split() for line in out.splitlines() if "short x1" in line]
    assert [line[:2] for line in lines] == [
        *(["1", "one-engine"], ["1", "push"], ["1", "pull"]),
        *(["2", "push"], ["2", "pull"], ["2", "one-engine"]),
    ]
