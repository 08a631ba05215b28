"""The client that puts load on a server: `vllm bench serve`, in the engine's Python.

It measures requests and nothing else; what engines count is read elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.resources import files
from pathlib import Path
from typing import IO, Any

from pdlaunch.bench.results import Request
from pdlaunch.bench.workload import Load
from pdlaunch.engine import Engine
from pdlaunch.engine_install import clean_environment
from pdlaunch.errors import PdError
from pdlaunch.plan import DeploymentPlan

_SCRIPT = "bench_loads.py"
_CLOSE_WITHIN_S = 10.0
_MICROSECOND_DIGITS = 6
_SAMPLING_SEED = 7


class Client:
    """A process that runs loads, one after the other; made by `client`."""

    def __init__(
        self, process: subprocess.Popen[str], stdin: IO[str], stdout: IO[str], folder: Path
    ) -> None:
        self._process = process
        self._stdin = stdin
        self._stdout = stdout
        self._folder = folder
        self._is_ready = False

    @property
    def pid(self) -> int:
        return self._process.pid

    async def run(
        self, load: Load, url: str, plan: DeploymentPlan, *, seed: int, salt: str
    ) -> tuple[float, list[Request]]:
        """Send a load's requests; the seconds it took, and each request in order.

        Args:
            seed: decides prompts and times of arrival.
            salt: requests of one salt share prefix caches, of another never.
        """
        dataset, result = self._folder / "prompts.jsonl", self._folder / "result.json"
        dataset.write_text(trace(load, seed), "utf-8")
        result.unlink(missing_ok=True)
        await self._asked(
            "serve",
            *arguments(load, plan, dataset, seed=seed),
            *sending(load, url, result, salt=salt),
        )
        return parse(json.loads(result.read_text("utf-8")))

    async def prompts(self, load: Load, plan: DeploymentPlan, *, seed: int) -> list[list[int]]:
        """The tokens of a load's prompts."""
        dataset = self._folder / "prompts.jsonl"
        dataset.write_text(trace(load, seed), "utf-8")
        prompts = await self._asked("prompts", *arguments(load, plan, dataset, seed=seed))
        if prompts is None:
            raise self._failed("it named no prompts")
        return prompts

    async def _asked(self, *line: str) -> list[list[int]] | None:
        if not self._is_ready:
            await self._answer()
            self._is_ready = True
        self._stdin.write(json.dumps(line) + "\n")
        self._stdin.flush()
        return await self._answer()

    async def _answer(self) -> list[list[int]] | None:
        try:
            line = await asyncio.to_thread(self._stdout.readline)
        except asyncio.CancelledError:
            # The thread reads until there is nothing more to come.
            self._process.kill()
            raise
        if not line:
            raise self._failed("it ended")
        failure, found = json.loads(line)
        if failure is not None:
            raise self._failed(failure)
        tokens: list[list[int]] | None = found
        return tokens

    def _failed(self, how: str) -> PdError:
        log = _log(self._folder)
        return PdError(f"vllm bench serve failed: {how}", where=str(log), next_step=f"less {log}")


@contextmanager
def client(
    engine: Engine, folder: Path, environ: Mapping[str, str] = os.environ
) -> Iterator[Client]:
    """Start the process, and end it in any case. It ends by itself when we are killed."""
    env = clean_environment() | {
        # Prompts are drawn by hash: the same in every process.
        "PYTHONHASHSEED": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if key := environ.get("VLLM_API_KEY"):
        env["OPENAI_API_KEY"] = key
    script = files("pdlaunch.engine_scripts").joinpath(_SCRIPT)
    with (
        _log(folder).open("wb") as log,
        subprocess.Popen(
            [str(engine.python), str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=env,
            # A Ctrl-C of the terminal is for pdlaunch.
            start_new_session=True,
        ) as process,
    ):
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("a pipe that was asked for is missing")
        try:
            yield Client(process, process.stdin, process.stdout, folder)
            process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_CLOSE_WITHIN_S)
        finally:
            with suppress(ProcessLookupError):
                process.kill()


def arguments(load: Load, plan: DeploymentPlan, dataset: Path, *, seed: int) -> list[str]:
    """What `vllm bench serve` gets of a load's prompts."""
    return [
        *("--backend", "openai", "--model", plan.served_name, "--tokenizer", plan.model),
        # The one data set whose prompts are tokens: of the length one asks for, the same for all.
        *("--dataset-name", "timed_trace", "--dataset-path", str(dataset), "--no-self-timed"),
        *("--timed-trace-chunk-hash-size", str(load.cached_tokens or load.prompt_tokens)),
        *("--num-prompts", str(load.requests), "--seed", str(seed)),
    ]


def sending(load: Load, url: str, result: Path, *, salt: str) -> list[str]:
    """What it gets of where to send them, how, and where the result goes."""
    body: dict[str, Any] = {"cache_salt": salt, "skip_special_tokens": False}
    if load.temperature:
        body["seed"] = _SAMPLING_SEED
    pace = (
        ("--request-rate", f"{load.requests_per_s:g}")
        if load.requests_per_s is not None
        else ("--max-concurrency", str(load.at_once))
    )
    return [
        *("--base-url", url, "--endpoint", "/v1/completions", *pace),
        # Engines pair the legs of a request by its id: none comes twice.
        *("--request-id-prefix", f"bench-{secrets.token_hex(6)}-"),
        *("--temperature", f"{load.temperature:g}", "--ignore-eos"),
        *("--extra-body", json.dumps(body)),
        *("--save-result", "--save-detailed", "--disable-tqdm"),
        *("--result-dir", str(result.parent), "--result-filename", result.name),
    ]


def parse(found: Mapping[str, Any]) -> tuple[float, list[Request]]:
    """A result file of `vllm bench serve --save-detailed`."""
    rows = zip(
        *(
            found[name]
            for name in ("ttfts", "latencies", "itls", "output_lens", "generated_texts", "errors")
        ),
        strict=True,
    )
    return found["duration"], [
        Request(
            ttft_s=_rounded(ttft_s),
            latency_s=_rounded(latency_s),
            itl_s=tuple(_rounded(each) for each in itl_s),
            answer_tokens=tokens,
            text=text,
            error=error.strip().rpartition("\n")[2],
        )
        for ttft_s, latency_s, itl_s, tokens, text, error in rows
    ]


def trace(load: Load, seed: int) -> str:
    """Lines of a trace. A prompt is drawn from one number, or two where a part of it is cached."""
    first = seed * 2 * load.requests
    lines = []
    for number in range(first, first + 2 * load.requests, 2):
        entry = {
            "timestamp": 0,
            "input_length": load.prompt_tokens,
            "output_length": load.answer_tokens,
            "hash_ids": [number, number + 1] if load.cached_tokens else [number],
        }
        lines.append(json.dumps(entry))
    return "\n".join(lines) + "\n"


def _log(folder: Path) -> Path:
    return folder / "client.log"


def _rounded(seconds: float) -> float:
    return round(seconds, _MICROSECOND_DIGITS)
