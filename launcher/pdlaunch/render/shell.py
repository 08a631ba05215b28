"""Shows a plan as commands to copy, or as containers, grouped by host. Quotes for a shell."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import yaml

from pdlaunch import containers
from pdlaunch.plan import DeploymentPlan, ProcessPlan
from pdlaunch.redaction import redact


def commands(plan: DeploymentPlan) -> str:
    """The plan as shell commands, one block a process, with what belongs to it in comments."""
    lines = [
        f"# {plan.name}: {plan.served_name}, KV by {plan.mode}, vLLM {plan.engine_version}",
        *(f"# note: {note}" for note in plan.notes),
    ]
    for host in dict.fromkeys(process.host for process in plan.own):
        on_host = [process for process in plan.own if process.host == host]
        container = on_host[0].container
        if container is not None:
            where = f"containers at {container.endpoint}"
        elif on_host[0].is_here:
            where = "this machine"
        else:
            where = f"another host: {_elsewhere(on_host)}"
        lines += ["", f"# --- {host} ({where}) ---"]
        if container is None and not on_host[0].is_here:
            lines.append("# The paths are those of this machine; `pdlaunch up` has its own there.")
        for process in on_host:
            lines += ["", *_process(process)]
    return redact("\n".join(lines))


def _elsewhere(processes: list[ProcessPlan]) -> str:
    roles = dict.fromkeys(process.role for process in processes)
    return " and ".join(f"`pdlaunch up RECIPE --only {role}`" for role in roles) + " there"


def _process(process: ProcessPlan) -> Iterator[str]:
    facts = [process.url]
    if process.side_channel_port is not None:
        facts.append(f"side channel {process.side_channel_port}")
    if process.metrics_port is not None:
        facts.append(f"metrics {process.metrics_port}")
    for label, indexes in (("cores", process.cores), ("devices", process.devices)):
        if indexes:
            facts.append(f"{label} {', '.join(map(str, indexes))}")
    yield f"# {process.name}: {'; '.join(facts)}"
    if process.container is not None:
        yield f"# {process.container.name}, in the words of Docker's API"
        yield yaml.safe_dump(containers.request(process), sort_keys=False, width=100_000).rstrip()
        return
    parts = ["env", *(f"-u {name}" for name in process.env_unset)]
    parts = [" ".join(parts)]
    parts += [
        f"{name}={shlex.quote(value)}"
        for name, value in sorted(process.env.items())
        if name not in process.env_prepend
    ]
    parts += [_prepended(process, name) for name in process.env_prepend]
    parts += _argv(process.argv)
    yield " \\\n  ".join(parts)


def _prepended(process: ProcessPlan, name: str) -> str:
    value = process.env_prepend[name]
    if name in process.env:
        return f"{name}={shlex.quote(f'{value}:{process.env[name]}')}"
    if name in process.env_unset:
        return f"{name}={shlex.quote(value)}"
    # Left for the shell that runs the command, whose value is not known here.
    return f'{name}="{value}${{{name}:+:${name}}}"'


def _argv(argv: tuple[str, ...]) -> list[str]:
    lines: list[str] = []
    for word in argv:
        if lines and not word.startswith("--"):
            lines[-1] += f" {shlex.quote(word)}"
        else:
            lines.append(shlex.quote(word))
    return lines
