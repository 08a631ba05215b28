"""`pdlaunch status --watch`: what it shows, on a terminal and on a pipe, whatever happens."""

from __future__ import annotations

import io
import os
import pty
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from launching import Launcher, until
from pdlaunch import deployments
from pdlaunch.cli import showing
from pdlaunch.engine_metrics import Failures, KvMovement
from pdlaunch.rates import Rates
from pdlaunch.status import DeploymentStatus, ProcessStatus
from pdlaunch.transport import Transport
from pdlaunch.watch import View

CLOCK = "2026-11-30T17:00:00"
NO_KV = KvMovement(*[0.0] * len(KvMovement.__dataclass_fields__))
RATES = Rates(123.4, 5.0, 1.5 * 2**20, 2.0, 0.18, 0.25)
ENGINE = ProcessStatus(
    name="prefill-0",
    role="prefill",
    url="http://127.0.0.1:1",
    pid=1,
    restarts=0,
    is_healthy=True,
    kv_cache_usage=0.25,
    requests_running=3,
    requests_waiting=1,
    failures=Failures({"aborted": 2}, 0, 0, {"stray": 1}),
    transport=Transport(("UCX",), ucx=("tcp/lo",)),
    nixl_bytes=4.0 * 2**20,
)
GONE = replace(ENGINE, name="decode-0", role="decode", is_healthy=False, failures=None, restarts=1)
ROUTER = replace(ENGINE, name="router", role="router", failures=None, transport=None)


def view(*processes: ProcessStatus) -> View:
    found = DeploymentStatus(
        name="a",
        state="ready",
        is_healthy=True,
        url="http://127.0.0.1:8000",
        model="[red]m",
        transfer_mode="push",
        engine_version="0.32.0",
        up_s=61.0,
        processes=processes,
        kv=NO_KV,
        events=(),
    )
    return View("a", found, {"prefill-0": RATES})


def test_a_pipe_gets_a_line_for_each_process() -> None:
    assert list(showing.watch_lines([view(ENGINE, GONE, ROUTER), View("b", None, {})], CLOCK)) == [
        f"{CLOCK} a prefill-0 state=ready health=ok restarts=0 kv_cache=25.0% running=3 waiting=1 "
        "prompt_tokens_per_s=123.4 output_tokens_per_s=5.0 ttft_ms=180 ttft_p90_ms=250 "
        "kv_mib_per_s=1.50 transfers_per_s=2.0 failed=2 dropped_messages=1",
        f"{CLOCK} a decode-0 state=ready health=no_answer restarts=1 kv_cache=- running=- "
        "waiting=- prompt_tokens_per_s=- output_tokens_per_s=- ttft_ms=- ttft_p90_ms=- "
        "kv_mib_per_s=- transfers_per_s=- failed=- dropped_messages=-",
        f"{CLOCK} a router state=ready health=ok restarts=0",
        f"{CLOCK} b state=down",
    ]


def drawn(*views: View, width: int = 100) -> str:
    console = Console(width=width, highlight=False, file=io.StringIO())
    with console.capture() as shown:
        console.print(showing.screen(views))
    return shown.get()


def test_a_terminal_gets_one_picture() -> None:
    text = drawn(
        view(replace(ENGINE, doubts=("it may be TCP",)), GONE, ROUTER), View("b", None, {})
    )
    lines = [line.split() for line in text.splitlines()]
    assert ["prefill-0", "ok", "25.0%", "3", "1", "123.4", "5.0", "180", "250", "1.50", "2.0"] in (
        lines
    )
    assert ["decode-0", "no", "answer,", "1", "restarted", *"-" * 9] in lines
    assert ["router", "ok"] in lines
    # Names are not taken for markup.
    assert "model [red]m" in text
    assert "  prefill-0: UCX (tcp/lo), 4.00 MiB moved" in text
    assert "  decode-0: not known, it does not answer" in text
    assert "warning: it may be TCP" in text
    assert "b is down" in text


def test_the_picture_fits_a_terminal_of_usual_width() -> None:
    table = [
        line
        for line in drawn(view(ENGINE, ROUTER), width=80).splitlines()
        if line.startswith("prefill-0 ")
    ]
    assert [len(line.split()) for line in table] == [11]
    assert "…" not in table[0]


@pytest.fixture
def up(launcher: Launcher) -> Iterator[Launcher]:
    assert launcher.run("up", launcher.recipe("a"), "--detach")[0] == 0
    yield launcher
    assert launcher.run("down", "a")[0] == 0


def figures(line: str) -> dict[str, str]:
    return dict(word.partition("=")[::2] for word in line.split() if "=" in word)


def lines_of(output: Path, process: str) -> list[dict[str, str]]:
    return [figures(line) for line in output.read_text().splitlines() if f" a {process} " in line]


def test_watching_a_deployment_under_load_that_dies_and_goes(up: Launcher) -> None:
    command = up.begin("status", "a", "--watch", "--interval", "0.1")
    assert until(lambda: len(lines_of(command.output, "decode-0")) >= 2)
    assert up.run("ask", "a", "Capital?")[0] == 0

    def seen(name: str, value: str, process: str = "decode-0") -> bool:
        return any(each.get(name) == value for each in lines_of(command.output, process))

    # Each request has its first token after 0.2 s, as the engine counts.
    assert until(lambda: seen("ttft_ms", "200") and seen("ttft_ms", "200", "prefill-0"))
    busy = [each for each in lines_of(command.output, "decode-0") if each["ttft_ms"] == "200"]
    assert float(busy[0]["output_tokens_per_s"]) > 0 and float(busy[0]["transfers_per_s"]) > 0

    os.kill(deployments.need("a").pids["decode-0"], signal.SIGKILL)
    assert until(lambda: seen("health", "no_answer") and seen("restarts", "1"))
    assert until(lambda: lines_of(command.output, "decode-0")[-1]["health"] == "ok")
    rates = [
        float(value)
        for process in ("prefill-0", "decode-0")
        for each in lines_of(command.output, process)
        for name, value in each.items()
        if name.endswith("_per_s") and value != "-"
    ]
    assert rates and min(rates) >= 0

    assert up.run("down", "a")[0] == 0
    assert until(lambda: command.output.read_text().endswith(" a state=down\n"))
    assert up.run("up", up.recipe("a"), "--detach")[0] == 0
    assert until(lambda: lines_of(command.output, "router")[-1]["state"] == "ready")

    command.kill(signal.SIGINT)
    assert command.wait() == 130
    assert "Traceback" not in command.errors.read_text()
    assert "\x1b" not in command.output.read_text()


def test_watching_on_a_terminal_until_ctrl_c(up: Launcher) -> None:
    outside, inside = pty.openpty()
    shown: list[bytes] = []

    def listen() -> None:
        # The terminal is gone when its last user has closed it.
        try:
            while piece := os.read(outside, 65536):
                shown.append(piece)
        except OSError:
            pass

    listener = threading.Thread(target=listen)
    listener.start()
    command = up.begin("status", "--watch", "--interval", "0.1", terminal=inside)
    os.close(inside)
    assert until(lambda: b"".join(shown).count(b"prefill-0") >= 6)
    command.kill(signal.SIGINT)
    assert command.wait() == 130
    listener.join()
    os.close(outside)
    text = b"".join(shown).decode()
    assert "NIXL's backends" in text and "Traceback" not in text
    # The cursor is there again.
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l")


def test_what_cannot_be_watched_is_said(launcher: Launcher) -> None:
    assert launcher.run("status", "--watch") == (0, "", "• nothing is up\n")
    code, _, err = launcher.run("status", "b", "--watch")
    assert code == 2 and "no deployment b is up" in err
    assert launcher.run("status", "--watch", "--json")[0] == 2
    assert launcher.run("status", "--interval", "2")[0] == 2
