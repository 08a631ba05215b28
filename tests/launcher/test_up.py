"""`pdlaunch up` and the rest of a deployment's life, with a fake engine."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import time
from pathlib import Path

import pytest

from checkpoints import write_weights
from fake_upstream import FakeReporter
from launching import Command, Launcher, crash, fake_processes, leftover_files, until
from pdlaunch import deployments, engine, preparation, recipe_loader, warm_start


@pytest.fixture(autouse=True)
def nothing_is_left(launcher: Launcher) -> object:
    yield
    for command in launcher.started:
        if command.code is not None:
            continue
        command.kill(signal.SIGINT)
        command.wait()
    assert until(lambda: not fake_processes()), fake_processes()
    assert until(lambda: not leftover_files()), leftover_files()


@pytest.mark.parametrize("mode", ["push", "pull", "push-upstream"])
def test_up_is_ready_when_kv_moved_by_the_recipes_mode(launcher: Launcher, mode: str) -> None:
    command = launcher.begin("up", launcher.recipe("a"), "--set", f"transfer.mode={mode}")
    command.until("a is ready: http://127.0.0.1:")
    assert f"KV moved by {mode}" in command.errors.read_text()
    command.kill(signal.SIGINT)
    assert command.wait() == 130
    assert deployments.read("a") is None


def test_detached_life(launcher: Launcher) -> None:
    code, out, err = launcher.run("up", launcher.recipe("a"), "--detach", "--json")
    assert code == 0, err
    assert json.loads(out)["name"] == "a"

    code, out, _ = launcher.run("status", "a", "--json")
    status = json.loads(out)
    assert code == 0
    assert status["is_healthy"] is True
    assert [process["name"] for process in status["processes"]] == [
        "prefill-0",
        "decode-0",
        "router",
    ]
    assert status["kv"]["bytes_during_prefill"] > 0
    nothing = {"transfers": {}, "liveness": 0, "hangs": 0, "dropped_messages": {}}
    assert [process["failures"] for process in status["processes"]] == [nothing, nothing, None]
    assert launcher.run("status", "a")[1].endswith("\nno failed transfers\n")

    code, out, err = launcher.run("ask", "a", "What is the capital of France?")
    assert (code, out) == (0, "Paris\n")
    assert "TTFT" in err and "transfer mode push: 4 KiB pushed" in err

    code, out, _ = launcher.run("ask", "a", "Capital?", "--json")
    assert json.loads(out)["text"] == "Paris"
    assert json.loads(out)["kv"]["registrations_before_prefill_end"] == 1

    code, out, _ = launcher.run("logs", "a", "prefill-0")
    assert (code, "serving on" in out) == (0, True)
    code, out, _ = launcher.run("logs")
    assert "decode-0 | INFO" in out

    code, _, err = launcher.run("up", launcher.recipe("a"))
    assert code == 0 and "a runs already by this recipe" in err

    assert launcher.run("down", "a")[0] == 0
    assert not fake_processes()
    assert launcher.run("down", "a")[0] == 0
    assert launcher.run("status")[0] == 0


def test_a_traced_deployment_draws_what_it_is_asked(launcher: Launcher) -> None:
    assert launcher.run("up", launcher.recipe("a"), "--trace", "--detach")[0] == 0
    assert len(list(deployments.trace_folder("a").iterdir())) == 2

    code, out, err = launcher.run("ask", "a", "Capital?")
    assert (code, out) == (0, "Paris\n")
    told = err.splitlines()
    assert [each for each in told if each.startswith("prefill") and "tokens 0 to 7" in each]
    assert [line for line in told if line.startswith("after prefill")]
    # Nothing of a terminal in what a pipe gets.
    assert "\x1b" not in err

    data = json.loads(launcher.run("ask", "a", "Capital?", "--json")[1])
    assert data["timeline"]["request_id"].startswith("chatcmpl-")
    whats = [span["what"] for span in data["timeline"]["spans"]]
    assert "waits for the first token" in whats and "computes a token" in whats

    assert launcher.run("down", "a")[0] == 0


def test_without_trace_nothing_is_stamped_and_ask_says_what_it_always_said(
    launcher: Launcher,
) -> None:
    assert launcher.run("up", launcher.recipe("a"), "--detach")[0] == 0
    assert not deployments.trace_folder("a").exists()
    _, _, err = launcher.run("ask", "a", "Capital?")
    assert [line.split()[1] for line in err.splitlines()] == [
        *("TTFT", "decode", "tokens:", "transfer", "decode")
    ]
    data = json.loads(launcher.run("ask", "a", "Capital?", "--json")[1])
    assert not {"timeline", "client", "request_id"} & data.keys()
    assert launcher.run("down", "a")[0] == 0


def test_only_push_can_be_traced(launcher: Launcher) -> None:
    recipe = launcher.recipe("a")
    code, _, err = launcher.run("up", recipe, "--trace", "--set", "transfer.mode=pull")
    assert code == 2 and "transfers by pull cannot be traced" in err
    _, out, _ = launcher.run("up", recipe, "--trace", "--dry-run", "--json")
    plan = json.loads(out)
    assert plan["trace_folder"] == str(deployments.trace_folder("a"))
    told = [" ".join(process["argv"]) for process in plan["processes"]]
    expected = f'"push_trace": "{plan["trace_folder"]}"'
    assert [expected in each for each in told] == [True, True, False]


def test_status_tells_what_failed_since_the_start(launcher: Launcher) -> None:
    recipe = launcher.recipe("a", "decode: {env: {FAKE_ENGINE: fails}}\n")
    assert launcher.run("up", recipe, "--detach")[0] == 0
    _, out, _ = launcher.run("status", "a", "--json")
    by_name = {process["name"]: process["failures"] for process in json.loads(out)["processes"]}
    assert by_name["decode-0"] == {
        "transfers": {"aborted": 1, "peer_gone": 2},
        "liveness": 2,
        "hangs": 1,
        "dropped_messages": {"stray": 1},
    }
    _, out, _ = launcher.run("status", "a")
    told = "failures since start:\n  decode-0: 3 failed transfers (peer_gone 2, aborted 1); "
    told += "2 lost to a silent or dead peer; 1 given up while prefill was silent; "
    assert out.endswith(told + "1 dropped message (stray 1)\n")

    assert launcher.run("down", "a")[0] == 0


def test_kv_that_moves_over_another_backend_than_asked_is_warned_of(launcher: Launcher) -> None:
    efa = "transfer: {backends: [LIBFABRIC]}\nprefill: {env: {FI_PROVIDER: efa}}\n"
    recipe = launcher.recipe("a", efa + "decode: {env: {FAKE_ENGINE: nixl=UCX}}\n")
    code, _, err = launcher.run("up", recipe, "--detach")
    assert code == 0
    doubt = (
        "the recipe asks for LIBFABRIC, and decode-0 moves KV over UCX (transports not known): "
        "not over EFA, and over TCP where UCX finds nothing better"
    )
    assert f"warning: {doubt}\n" in err
    assert "prefill-0 moves KV by NIXL over: LIBFABRIC (provider not known)\n" in err

    _, out, err = launcher.run("status", "a")
    assert "\n  decode-0: UCX (transports not known)\n" in out
    assert err == f"warning: {doubt}\n"
    _, out, _ = launcher.run("status", "a", "--json")
    prefill, decode, router = json.loads(out)["processes"]
    assert prefill["transport"] == {"backends": ["LIBFABRIC"], "providers": [], "ucx": []}
    assert decode["transport"]["backends"] == ["UCX"]
    assert router["transport"] is None
    assert prefill["nixl_bytes"] > 0 and decode["nixl_bytes"] == 0
    assert [each["doubts"] for each in (prefill, decode, router)] == [[], [doubt], []]
    assert launcher.run("down", "a")[0] == 0


def test_engine_that_dies_at_start_is_reported_with_cause_and_log(launcher: Launcher) -> None:
    recipe = launcher.recipe("a", "decode: {env: {FAKE_ENGINE: dies=7}}\n")
    code, _, err = launcher.run("up", recipe)
    assert code == 7
    assert "decode-0 exited with code 7" in err
    assert "ValueError: no such model" in err
    assert f"where: {deployments.log_dir('a') / 'decode-0.log'}" in err
    assert f"next:  pdlaunch logs a decode-0; pdlaunch doctor {recipe}\n" in err
    assert "Traceback" not in err
    assert deployments.read("a") is None


@pytest.mark.parametrize("command", [("up",), ("up", "--detach")])
def test_up_refuses_what_cannot_work_before_it_builds_anything(
    launcher: Launcher, command: tuple[str, ...]
) -> None:
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 8}
    (launcher.folder / "model").mkdir()
    (launcher.folder / "model" / "config.json").write_text(
        json.dumps({**sizes, "head_dim": 128, "dtype": "bfloat16"})
    )
    write_weights(launcher.folder / "model" / "model.safetensors", 1000)
    recipe = launcher.recipe("a", "decode: {kv_cache_gib: 0.1}\nmax_model_len_tokens: 8192\n")
    code, _, err = launcher.run(*command, recipe)
    assert code == 2
    assert "decode: 102.4 MiB a worker at 32.0 KiB a token hold 3264 tokens, and one request" in err
    assert "where: decode.kv_cache_gib" in err
    assert "next:  lower max_model_len_tokens, or give it more: decode.kv_cache_gib 0.25" in err
    assert deployments.read("a") is None


def test_up_refuses_several_things_at_once(launcher: Launcher) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        code, _, err = launcher.run(
            "up",
            launcher.recipe("a", f"router: {{port: {port}}}\n"),
            *("--set", "prefill.kv_cache_gib=1000000"),
        )
    assert code == 2
    assert "2 things keep it from working" in err
    assert f"router.port: port {port} is taken by process " in err
    assert "memory: KV caches without the weights take" in err


def test_up_warns_of_what_works_less_well(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    code, _, err = launcher.run(
        "up", launcher.recipe("a", "prefill: {env: {FAKE_ENGINE: dies=7}}\n")
    )
    assert code == 7
    assert "warning: requests to 127.0.0.1 would go through the proxy" in err
    assert "export NO_PROXY=127.0.0.1" in err


def test_detached_start_that_fails_reports_the_same(launcher: Launcher) -> None:
    code, _, err = launcher.run(
        "up", launcher.recipe("a", "prefill: {env: {FAKE_ENGINE: dies=7}}\n"), "--detach"
    )
    assert code == 7
    assert "prefill-0 exited with code 7" in err and "ValueError: no such model" in err
    log = (deployments.log_dir("a") / "supervisor.log").read_text()
    assert "prefill-0 exited" in log and "Fatal Python error" not in log


def test_kv_that_does_not_move_is_a_failed_start(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_start, "_COUNTER_DELAY_S", 0.5)
    extra = "prefill: {env: {FAKE_ENGINE: no_kv}}\ndecode: {env: {FAKE_ENGINE: no_kv}}\n"
    code, _, err = launcher.run("up", launcher.recipe("a", extra))
    assert code == 1
    assert "no KV moved by push" in err


def test_start_that_takes_too_long_tells_what_each_process_was_doing(launcher: Launcher) -> None:
    recipe = launcher.recipe("a", "decode: {env: {FAKE_ENGINE: mute}}\n")
    code, _, err = launcher.run("up", recipe, "--set", "timeouts.ready_s=2")
    assert code == 1
    assert "not ready after 2 s" in err and "decode-0: serving on" in err
    assert "timeouts.ready_s" in err


def test_process_that_ignores_sigterm_is_killed_after_stop_s(launcher: Launcher) -> None:
    command = launcher.begin("up", launcher.recipe("a", "prefill: {env: {FAKE_ENGINE: deaf}}\n"))
    command.until("is ready")
    started = time.monotonic()
    command.kill(signal.SIGTERM)
    assert command.wait() == 143
    assert time.monotonic() - started >= 3


def serves(times: int) -> bool:
    """Whether P, with all its lives, has said so often that it serves."""
    log = deployments.log_dir("a") / "prefill-0.log"
    return log.exists() and log.read_text().count("serving on") == times


def ends_at_once(command: Command) -> None:
    started = time.monotonic()
    command.kill(signal.SIGTERM)
    assert command.wait() == 143
    assert time.monotonic() - started < 60


def test_what_still_starts_is_not_waited_for(launcher: Launcher) -> None:
    recipe = launcher.recipe("a", "prefill: {env: {FAKE_ENGINE: deaf mute}}\n")
    command = launcher.begin("up", recipe, "--set", "timeouts.stop_s=600")
    assert until(lambda: serves(1))
    ends_at_once(command)


def test_what_starts_again_is_not_waited_for(launcher: Launcher) -> None:
    recipe = launcher.recipe("a", "prefill: {env: {FAKE_ENGINE: later deaf mute}}\n")
    command = launcher.begin("up", recipe, "--set", "timeouts.stop_s=600")
    command.until("is ready")
    os.kill(deployments.need("a").pids["prefill-0"], signal.SIGKILL)
    assert until(lambda: serves(2))
    ends_at_once(command)


def test_second_signal_does_not_wait_for_stop_s(launcher: Launcher) -> None:
    recipe = launcher.recipe("a", "prefill: {env: {FAKE_ENGINE: deaf}}\n")
    command = launcher.begin("up", recipe, "--set", "timeouts.stop_s=600")
    command.until("is ready")
    command.kill(signal.SIGINT)
    command.until("taking a down")
    command.kill(signal.SIGINT)
    started = time.monotonic()
    assert command.wait() == 130
    assert time.monotonic() - started < 60


def test_children_that_left_their_session_and_shared_memory_go_too(launcher: Launcher) -> None:
    command = launcher.begin("up", launcher.recipe("a", "prefill: {env: {FAKE_ENGINE: orphan}}\n"))
    command.until("is ready")
    assert leftover_files()
    command.kill(signal.SIGINT)
    assert command.wait() == 130


def test_supervisor_that_is_killed_leaves_nothing_running(launcher: Launcher) -> None:
    command = launcher.begin(
        "up", launcher.recipe("a", "prefill: {env: {FAKE_ENGINE: orphan deaf}}\n")
    )
    command.until("is ready")
    command.kill(signal.SIGKILL)
    assert command.wait() == 137
    assert until(lambda: not fake_processes())
    _, out, _ = launcher.run("status", "--json")
    assert json.loads(out)[0]["state"] == "crashed"
    assert launcher.run("down")[0] == 0
    assert deployments.read("a") is None


def test_starter_of_a_detached_deployment_that_is_killed_early_takes_it_along(
    launcher: Launcher,
) -> None:
    recipe = launcher.recipe("a", "decode: {env: {FAKE_ENGINE: mute}}\n")
    command = launcher.begin("up", recipe, "--detach")
    command.until("prefill-0 is up")
    command.kill(signal.SIGKILL)
    command.wait()
    assert until(lambda: deployments.read("a") is None)


def test_crashed_deployment_is_cleared_by_the_next_up(launcher: Launcher) -> None:
    recipe = launcher.recipe("a")
    assert launcher.run("up", recipe, "--detach")[0] == 0
    crash("a")
    assert len(fake_processes()) >= 3
    code, _, err = launcher.run("up", recipe, "--detach")
    assert code == 0 and "clearing what a crashed a left" in err
    assert launcher.run("down", "a")[0] == 0


def test_interrupted_at_any_moment_leaves_nothing(launcher: Launcher) -> None:
    extra = "prefill: {env: {FAKE_ENGINE: orphan}}\n"
    started = time.monotonic()
    whole = launcher.begin("up", launcher.recipe("whole", extra))
    whole.until("is ready")
    lasts_s = time.monotonic() - started
    whole.kill(signal.SIGINT)
    whole.wait()
    moments = random.Random(11)
    for batch in range(5):
        names = [f"moment-{batch}-{number}" for number in range(4)]
        commands = [
            launcher.begin("up", launcher.recipe(name, extra), *(["--detach"] * (number % 2)))
            for number, name in enumerate(names)
        ]
        # Four at once take longer than one: the moments fall before, in and behind every step.
        waits = sorted(
            ((moments.uniform(0, 3 * lasts_s), command) for command in commands),
            key=lambda pair: pair[0],
        )
        begun = time.monotonic()
        for wait_s, command in waits:
            time.sleep(max(0.0, begun + wait_s - time.monotonic()))
            command.kill(moments.choice([signal.SIGINT, signal.SIGTERM]))
        for number, (name, command) in enumerate(zip(names, commands, strict=True)):
            code = command.wait()
            if number % 2 and code == 0:
                # It had detached already: the signal came for nobody.
                assert launcher.run("down", name)[0] == 0
            else:
                assert code in (130, 143), command.errors.read_text()
            assert "Traceback" not in command.errors.read_text()
            assert deployments.read(name) is None
        assert not fake_processes()
        assert not leftover_files()


def test_engine_that_dies_later_is_reported_and_started_again(launcher: Launcher) -> None:
    command = launcher.begin("up", launcher.recipe("a", "prefill: {env: {FAKE_ENGINE: orphan}}\n"))
    command.until("is ready")
    before = deployments.need("a").pids
    os.kill(before["prefill-0"], signal.SIGKILL)
    command.until("starting prefill-0 again")
    assert "prefill-0 was killed by SIGKILL" in command.errors.read_text()
    assert until(lambda: json.loads(launcher.run("status", "a", "--json")[1])["is_healthy"])
    assert until(lambda: "prefill-0" in deployments.need("a").transports)
    assert command.errors.read_text().count("prefill-0 moves KV by NIXL over: UCX") == 2
    after = deployments.need("a")
    assert after.transports["prefill-0"].backends == ("UCX",)
    assert after.pids["prefill-0"] != before["prefill-0"]
    assert after.pids["decode-0"] == before["decode-0"]
    assert after.restarts == {"prefill-0": 1}
    assert launcher.run("ask", "a", "Capital?")[1] == "Paris\n"
    command.kill(signal.SIGINT)
    assert command.wait() == 130


def test_engine_that_dies_too_often_takes_the_rest_down(launcher: Launcher) -> None:
    command = launcher.begin("up", launcher.recipe("a"), "--set", "restarts_per_hour=0")
    command.until("is ready")
    os.kill(deployments.need("a").pids["decode-0"], signal.SIGKILL)
    assert command.wait() == 137
    assert "decode-0 was killed by SIGKILL" in command.errors.read_text()


def test_only_starts_one_role_under_a_name_of_its_own(launcher: Launcher) -> None:
    recipe = launcher.recipe("a", "decode: {host: 203.0.113.9}\n")
    command = launcher.begin("up", recipe, "--only", "prefill")
    command.until("a-prefill is up")
    record = deployments.read("a-prefill")
    assert record is not None and list(record.pids) == ["prefill-0"]
    code, _, err = launcher.run("up", recipe, "--only", "decode")
    assert code == 2 and "belongs to 203.0.113.9" in err
    assert "next:  use --set decode.host=ADDRESS, one of this machine's, if this is" in err
    code, _, err = launcher.run("up", recipe)
    assert code == 2 and "where: decode.host" in err


def test_router_by_itself_needs_no_engine(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    router = tmp_path / "router" / "vllm-router"
    elsewhere = "prefill: {host: 203.0.113.8}\ndecode: {host: 203.0.113.9}\n"
    loaded = recipe_loader.load(Path(launcher.recipe("a", elsewhere)), ())
    provided = []
    monkeypatch.setattr(engine, "planned_router", lambda: router)
    monkeypatch.setattr(engine, "ensure_router", lambda reporter: provided.append(router))
    monkeypatch.delattr(engine, "ensure")
    plan = preparation.planned(loaded, "router")
    preparation.provide(loaded.recipe, plan, FakeReporter())
    assert [process.argv[0] for process in plan.own] == [str(router)]
    assert provided == [router]


def test_taken_port_is_named_before_anything_starts(launcher: Launcher) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        code, _, err = launcher.run("up", launcher.recipe("a"), "--set", f"prefill.port={port}")
    assert code == 2
    assert f"port {port} is taken by process " in err
    assert "where: prefill.port" in err
    assert not deployments.folder("a").exists()


def test_missing_engine_program_is_a_message(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "engine" / "vllm").unlink()
    code, _, err = launcher.run("up", launcher.recipe("a"))
    assert code == 1
    assert "cannot start prefill-0: No such file" in err
    assert "Traceback" not in err


def test_dry_run_touches_nothing(launcher: Launcher, state: Path) -> None:
    code, out, _ = launcher.run("up", launcher.recipe("a"), "--dry-run")
    assert code == 0
    assert "--kv-transfer-config" in out and "# prefill-0: http://127.0.0.1:" in out
    code, out, _ = launcher.run("up", launcher.recipe("a"), "--dry-run", "--json")
    assert json.loads(out)["name"] == "a"
    assert not state.exists()


def test_secrets_of_the_environment_are_not_shown(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    recipe = launcher.recipe("a")
    _, out, _ = launcher.run("up", recipe, "--dry-run", "--set", "served_name=hf_verysecret")
    assert "hf_verysecret" not in out and "<HF_TOKEN>" in out
