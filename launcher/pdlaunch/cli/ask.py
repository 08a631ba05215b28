"""`pdlaunch ask`: one question, its answer, and where the time went."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path

import click

from pdlaunch import deployments, trace
from pdlaunch.ask import Answer
from pdlaunch.ask import ask as send
from pdlaunch.cli import parameters
from pdlaunch.console import Terminal
from pdlaunch.errors import PdError
from pdlaunch.trace import Timeline

# Engines write when a transfer ends, which may be a little after the answer.
_TRACE_WITHIN_S = 2.0


@click.command(
    epilog=parameters.examples(
        'pdlaunch ask smollm2-135m-cpu "What is the capital of France?"',
        'pdlaunch ask smollm2-135m-cpu "Write a poem." --max-tokens 64 --temperature 1',
        'pdlaunch ask smollm2-135m-cpu "What is the capital of France?" --json',
    )
)
@parameters.running
@click.argument("prompt")
@click.option("--max-tokens", type=click.IntRange(min=1), default=256, show_default=True)
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Answer and figures as JSON, not streamed.")
def ask(name: str, prompt: str, max_tokens: int, temperature: float, as_json: bool) -> None:
    """Ask the deployment NAME one question through its router.

    The answer is streamed to stdout; where the time to its first token went, and how its KV came to
    the decode engine, goes to stderr. Of a deployment that is up with --trace, so does a timeline
    of the request on both engines.
    """
    terminal = Terminal()
    record = deployments.need(name)
    if record.condition() == "starting":
        raise PdError(
            f"{name} is still starting",
            where=record.plan.router_url,
            next_step=f"wait until it is ready: pdlaunch status {name}",
        )
    folder = record.plan.trace_folder
    answer = asyncio.run(
        send(
            record.plan,
            prompt,
            max_tokens=max_tokens,
            temperature=temperature,
            on_text=(lambda _: None) if as_json else terminal.stream,
        )
    )
    if as_json:
        line = None if folder is None else _timeline(Path(folder), answer)
        terminal.data(json.dumps(_as_data(answer, line), indent=2))
        return
    terminal.stream("\n")
    for told in _report(answer):
        terminal.status(told)
    if answer.kv.bytes_moved == 0:
        terminal.warning(f"no KV moved by {answer.transfer_mode} for this request")
    if folder is not None:
        _draw(terminal, Path(folder), answer)


def _draw(terminal: Terminal, folder: Path, answer: Answer) -> None:
    line = _timeline(folder, answer)
    if line is None:
        terminal.warning(f"no engine has traced {answer.request_id} in {folder}")
    else:
        terminal.draw(trace.for_terminal(line))


def _timeline(folder: Path, answer: Answer) -> Timeline | None:
    stamps = trace.wait_for(folder, answer.request_id, _TRACE_WITHIN_S)
    return trace.timeline(stamps, answer.client)


def _as_data(answer: Answer, line: Timeline | None) -> dict[str, object]:
    data = asdict(answer)
    # What only makes sense beside a trace.
    del data["request_id"], data["client"]
    if line is not None:
        data["timeline"] = {"request_id": answer.request_id, **line.model_dump()}
    data["timing"]["handover_s"] = answer.timing.handover_s
    return data


def _report(answer: Answer) -> list[str]:
    timing, kv = answer.timing, answer.kv
    lines = [
        f"TTFT {_ms(timing.ttft_s)}: prefill engine {_ms(timing.prefill_s)} computing and "
        f"{_ms(timing.prefill_queue_s)} queued, handover {_ms(timing.handover_s)}",
        f"decode engine: {_ms(timing.decode_queue_s)} waiting for KV and queued, first token "
        f"{_ms(timing.decode_ttft_s)} after it got the request; whole answer "
        f"{_ms(timing.total_s)}",
        f"tokens: {answer.prompt_tokens} in, {answer.completion_tokens} out",
    ]
    moved = f"transfer mode {answer.transfer_mode}: {kv.bytes_moved / 1024:.0f} KiB"
    if answer.transfer_mode == "push":
        lines += [
            f"{moved} pushed, {kv.bytes_during_prefill / 1024:.0f} KiB of them during prefill and "
            f"{kv.bytes_after_prefill / 1024:.0f} KiB after, in {_ms(timing.transfer_s)}",
            f"decode registered its blocks {_when(answer)} prefill ended",
        ]
    else:
        lines.append(f"{moved} in {_ms(timing.transfer_s)}")
    if answer.had_company:
        lines.append("other requests ran meanwhile: times are means, bytes are sums")
    return lines


def _when(answer: Answer) -> str:
    return "before" if answer.kv.registrations_before_prefill_end > 0 else "after"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"
