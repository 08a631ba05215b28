"""Deployments that are not as they should be: unreadable, crashed, still starting, gone."""

from __future__ import annotations

import json
from collections.abc import Iterator

import psutil
import pytest

from launching import Launcher, crash, fake_processes, leftover_files, until
from pdlaunch import deployments


@pytest.fixture(autouse=True)
def nothing_is_left(launcher: Launcher) -> Iterator[None]:
    yield
    launcher.run("down", "--all")
    assert until(lambda: not fake_processes()), fake_processes()
    assert until(lambda: not leftover_files()), leftover_files()


def up(launcher: Launcher, name: str) -> None:
    assert launcher.run("up", launcher.recipe(name), "--detach")[0] == 0


def damage(name: str) -> None:
    (deployments.folder(name) / "deployment.json").write_bytes(b'{"plan": {"name": "\xff')


def test_a_record_that_cannot_be_read_hides_no_other_deployment(launcher: Launcher) -> None:
    up(launcher, "a")
    up(launcher, "b")
    damage("a")
    code, out, err = launcher.run("status", "--json")
    assert code == 1
    assert [each["name"] for each in json.loads(out)] == ["b"]
    assert "warning: the record of a cannot be read" in err
    assert f"where: {deployments.folder('a') / 'deployment.json'}" in err
    assert "next:  pdlaunch down a" in err
    assert launcher.run("status", "b")[0] == 0
    code, _, err = launcher.run("status", "a")
    assert code == 1 and "next:  pdlaunch down a" in err
    assert launcher.run("down", "b")[0] == 0


def test_a_step_of_the_clock_makes_no_supervisor_a_stranger(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    up(launcher, "a")
    booted_s = psutil.boot_time()
    # What psutil takes the time of a process from.
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: booted_s + 3600)
    assert deployments.need("a").condition() == "ready"
    assert launcher.run("down", "a")[0] == 0


def test_down_finds_the_supervisor_of_a_record_that_cannot_be_read(launcher: Launcher) -> None:
    up(launcher, "a")
    damage("a")
    code, _, err = launcher.run("down")
    assert code == 0 and "a is down" in err and "docker" not in err
    assert not fake_processes() and deployments.names() == []


def test_down_finds_what_a_crash_left_of_a_record_that_cannot_be_read(launcher: Launcher) -> None:
    up(launcher, "a")
    up(launcher, "b")
    crash("a")
    damage("a")
    code, _, err = launcher.run("down", "a")
    assert code == 0
    assert f"--filter label=pdlaunch.owner={deployments.owner('a')}" in err
    assert deployments.names() == ["b"]
    assert json.loads(launcher.run("status", "b", "--json")[1])["is_healthy"]


def test_down_of_all_goes_on_where_one_cannot_be_taken_down(launcher: Launcher) -> None:
    up(launcher, "b")
    in_the_way = deployments.create_folder("a") / "deployment.json"
    in_the_way.mkdir()
    code, _, err = launcher.run("down", "--all")
    assert code == 1
    assert "error: a cannot be taken down" in err and "b is down" in err
    assert f"then delete {deployments.folder('a')}" in err
    in_the_way.rmdir()


def test_status_of_a_crash_fails_and_says_how_to_take_down_the_rest(launcher: Launcher) -> None:
    up(launcher, "a")
    crash("a")
    for options in ((), ("--json",)):
        code, out, err = launcher.run("status", *options)
        assert code == 1 and "crashed" in out
        assert "take down the rest: pdlaunch down a" in err
    assert launcher.run("down", "a")[0] == 0
    assert launcher.run("status")[0] == 0


def test_status_fails_while_a_process_is_left_dead(launcher: Launcher) -> None:
    recipe = launcher.recipe("a", "decode: {replicas: 2, restart: {policy: never}}\n")
    assert launcher.run("up", recipe, "--detach")[0] == 0
    psutil.Process(deployments.need("a").pids["decode-0"]).kill()
    assert until(lambda: bool(deployments.need("a").events))
    code, _, err = launcher.run("status")
    assert code == 1 and "no answer from decode-0 of a: pdlaunch logs a PROCESS" in err
    assert launcher.run("restart", "a", "--process", "decode-0")[0] == 0
    assert launcher.run("status")[0] == 0


def test_what_starts_is_as_it_should_be_and_asks_for_patience(launcher: Launcher) -> None:
    starting = launcher.begin("up", launcher.recipe("a", "decode: {env: {FAKE_ENGINE: mute}}\n"))
    starting.until("prefill-0 is up")
    assert launcher.run("status", "a")[0] == 0
    code, _, err = launcher.run("ask", "a", "Capital?")
    assert code == 1 and "error: a is still starting" in err
    assert "next:  wait until it is ready: pdlaunch status a" in err


def test_logs_of_the_last_failed_start_need_no_name(launcher: Launcher) -> None:
    assert launcher.run("logs")[0] == 2
    for name in ("b", "a", "c"):
        # What ran before must not be taken for what ran last.
        bad = launcher.recipe(name, "prefill: {env: {FAKE_ENGINE: dies=7}}\n")
        assert launcher.run("up", bad)[0] == 7
    code, out, err = launcher.run("logs")
    assert code == 0 and "prefill-0 | RuntimeError: Engine core" in out
    assert "nothing is up; these are the logs of c, which ran last" in err
