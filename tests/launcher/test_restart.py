"""`pdlaunch restart`, deaths by policy, and `up` on what runs already, with fake engines."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator

import pytest

from launching import Launcher, fake_processes, load, until
from pdlaunch import deployments

TWO = "prefill: {{replicas: 2, env: {{FAKE_ENGINE: {quirks}}}}}\ndecode: {{replicas: 2}}\n"


@pytest.fixture(autouse=True)
def nothing_is_left(launcher: Launcher) -> Iterator[None]:
    yield
    for name in deployments.names():
        launcher.run("down", name)
    assert until(lambda: not fake_processes()), fake_processes()


def up(launcher: Launcher, extra: str, *options: str) -> str:
    recipe = launcher.recipe("a", extra)
    code, _, err = launcher.run("up", recipe, "--detach", *options)
    assert code == 0, err
    return recipe


def status(launcher: Launcher) -> dict:
    return json.loads(launcher.run("status", "a", "--json")[1])


def said(launcher: Launcher, process: str) -> list[str]:
    return [each["what"] for each in status(launcher)["events"] if each["process"] == process]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_role_with_replicas_restarts_without_a_failed_request(
    launcher: Launcher, role: str
) -> None:
    up(launcher, TWO.format(quirks="slow=0.3"))
    before = deployments.need("a").pids
    with load("a") as answers:
        code, _, err = launcher.run("restart", "a", "--role", role)
    assert code == 0, err
    assert set(answers) == {200}
    after = deployments.need("a").pids
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {f"{role}-0", f"{role}-1"}
    assert err.index(f"{role}-0: back in service") < err.index(f"{role}-1: taking it out")
    assert err.count("2 pairs of prefill and decode connected") == 2
    assert status(launcher)["is_healthy"]
    assert said(launcher, f"{role}-1")[-1] == "back in service"
    assert deployments.need("a").restarts == {}


def test_the_only_process_of_a_role_restarts_with_a_word_about_it(launcher: Launcher) -> None:
    up(launcher, "")
    before = deployments.need("a").pids
    code, _, err = launcher.run("restart", "a", "--process", "decode-0")
    assert code == 0, err
    assert "requests fail until decode-0 is back: it is the only decode" in err
    after = deployments.need("a").pids
    assert after["decode-0"] != before["decode-0"] and after["router"] == before["router"]
    assert launcher.run("ask", "a", "Capital?")[1] == "Paris\n"
    code, _, err = launcher.run("restart", "a")
    assert code == 0, err
    assert launcher.run("ask", "a", "Capital?")[1] == "Paris\n"


def test_restart_of_what_is_not_there_names_what_is(launcher: Launcher) -> None:
    up(launcher, "")
    code, _, err = launcher.run("restart", "a", "--process", "decode-7")
    assert code == 2 and "one of: prefill-0, decode-0, router" in err
    code, _, err = launcher.run("restart", "a", "--process", "router", "--role", "router")
    assert code == 2 and "exclude each other" in err


def test_the_last_that_serves_is_not_taken_out_of_service(launcher: Launcher) -> None:
    up(launcher, TWO.format(quirks="none") + "restarts_per_hour: 0\n")
    os.kill(deployments.need("a").pids["decode-0"], signal.SIGKILL)
    assert until(lambda: bool(said(launcher, "decode-0")))
    code, _, err = launcher.run("restart", "a", "--process", "decode-1")
    assert code == 2 and "decode-1 is the only decode that serves now" in err
    # What is left dead comes back when it is asked for.
    assert launcher.run("restart", "a", "--process", "decode-0")[0] == 0
    assert launcher.run("restart", "a", "--process", "decode-1")[0] == 0
    assert status(launcher)["is_healthy"]


def test_what_dies_too_often_stays_dead_while_another_serves(launcher: Launcher) -> None:
    up(launcher, TWO.format(quirks="none"), "--set", "decode.restart.max_per_hour=1")
    for death in range(2):
        os.kill(deployments.need("a").pids["decode-0"], signal.SIGKILL)
        assert until(lambda: len(said(launcher, "decode-0")) > 2 * death)  # noqa: B023
        if not death:
            assert until(lambda: said(launcher, "decode-0")[-1] == "answers again")
    assert "leaving decode-0 dead" in said(launcher, "decode-0")[-1]
    found = {each["name"]: each["is_healthy"] for each in status(launcher)["processes"]}
    assert found == {
        "prefill-0": True,
        "prefill-1": True,
        "decode-0": False,
        "decode-1": True,
        "router": True,
    }
    assert launcher.run("ask", "a", "Capital?")[1] == "Paris\n"
    os.kill(deployments.need("a").pids["decode-1"], signal.SIGKILL)
    assert until(lambda: said(launcher, "decode-1")[-1:] == ["answers again"])
    os.kill(deployments.need("a").pids["decode-1"], signal.SIGKILL)
    assert until(lambda: not fake_processes())


def test_the_second_death_is_answered_after_a_wait(launcher: Launcher) -> None:
    up(launcher, "decode: {restart: {backoff_s: 2}}\n")
    os.kill(deployments.need("a").pids["decode-0"], signal.SIGKILL)
    assert until(lambda: said(launcher, "decode-0")[-1:] == ["answers again"])
    first = deployments.need("a").pids["decode-0"]
    os.kill(first, signal.SIGKILL)
    began_s = time.monotonic()
    assert until(lambda: deployments.need("a").pids["decode-0"] != first)
    assert time.monotonic() - began_s > 1.5
    assert any("starting decode-0 again in 2 s" in what for what in said(launcher, "decode-0"))


def test_up_by_the_same_recipe_says_that_it_runs(launcher: Launcher) -> None:
    recipe = up(launcher, TWO.format(quirks="none"))
    before = deployments.need("a").pids
    code, out, err = launcher.run("up", recipe, "--detach", "--json")
    assert code == 0 and "a runs already by this recipe" in err
    assert json.loads(out)["name"] == "a"
    assert deployments.need("a").pids == before


def test_up_by_another_recipe_names_changes_and_applies_them_when_told(launcher: Launcher) -> None:
    recipe = up(launcher, TWO.format(quirks="none"))
    before = deployments.need("a").pids
    change = ("--set", "decode.kv_cache_gib=2", "--set", "timeouts.drain_s=7")
    code, _, err = launcher.run("up", recipe, *change)
    assert code == 2
    assert "decode.kv_cache_gib: null -> 2" in err
    assert "timeouts.drain_s: 600.0 -> 7" in err
    assert "it would restart: decode-0, decode-1" in err
    assert "--apply" in err
    assert deployments.need("a").pids == before
    with load("a") as answers:
        code, _, err = launcher.run("up", recipe, *change, "--apply")
    assert code == 0, err
    assert set(answers) == {200}
    now = deployments.need("a")
    assert {name for name in before if before[name] != now.pids[name]} == {"decode-0", "decode-1"}
    assert str(2 * 2**30) in now.plan.of_role("decode")[0].argv
    assert now.plan.drain_s == 7
    assert launcher.run("up", recipe, *change)[0] == 0


def test_what_cannot_change_while_it_runs_is_said(launcher: Launcher) -> None:
    recipe = up(launcher, "")
    code, _, err = launcher.run("up", recipe, "--set", "transfer.mode=pull", "--apply")
    assert code == 2
    assert 'transfer.mode: "push" -> "pull" (not while it runs)' in err
    assert "pdlaunch down a, then the same command again" in err


def test_a_change_that_does_not_start_is_taken_back(launcher: Launcher) -> None:
    recipe = up(launcher, TWO.format(quirks="none"))
    code, _, err = launcher.run(
        "up", recipe, "--set", "decode.env={FAKE_ENGINE: dies=3}", "--apply"
    )
    assert code == 3
    assert "decode-0: did not come back by the new plan; starting it by the old one" in err
    assert "no such model" in err
    assert until(lambda: status(launcher)["is_healthy"])
    assert launcher.run("ask", "a", "Capital?")[1] == "Paris\n"
    assert launcher.run("up", recipe)[0] == 0
