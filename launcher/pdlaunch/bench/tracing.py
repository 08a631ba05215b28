"""One request of a traced pair, as its client and both engines saw it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from pdlaunch import readiness, trace
from pdlaunch.bench.workload import AS_IS, Load
from pdlaunch.errors import PdError
from pdlaunch.plan import DeploymentPlan
from pdlaunch.trace import ClientTimes, Timeline

_ANSWER_TOKENS = 4
_WRITTEN_WITHIN_S = 5.0


def load_of(loads: Sequence[Load]) -> Load:
    """Whose prompts show most: the longest, of those that one request has to itself."""

    def shows(load: Load) -> tuple[bool, bool, bool, int]:
        is_plain = not load.cached_by and not load.scattered
        return load.setup == AS_IS, is_plain, not load.busy_decodes, load.prompt_tokens

    return max(loads, key=shows)


async def timeline(plan: DeploymentPlan, prompts: Sequence[Sequence[int]]) -> Timeline | None:
    """Send prompts one after the other; what the engines traced of the last one.

    Raises:
        PdError: one was not answered.
    """
    async with httpx.AsyncClient(timeout=plan.request_s) as http:
        for prompt in prompts:
            transfer, times = await _ask(http, plan, prompt)
    if plan.trace_folder is None:
        return None
    stamps = trace.wait_for(Path(plan.trace_folder), transfer, _WRITTEN_WITHIN_S)
    return trace.timeline(stamps, times)


async def _ask(
    http: httpx.AsyncClient, plan: DeploymentPlan, prompt: Sequence[int]
) -> tuple[str, ClientTimes]:
    body = {
        "model": plan.served_name,
        "prompt": list(prompt),
        "max_tokens": _ANSWER_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    name, pieces_ns = "", []
    sent_ns = time.time_ns()
    try:
        async with http.stream(
            "POST", f"{plan.router_url}/v1/completions", json=body, headers=readiness.headers()
        ) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    pieces_ns.append(time.time_ns())
                    name = str(json.loads(line.removeprefix("data: ")).get("id", ""))
    except (httpx.HTTPError, ValueError) as error:
        raise PdError(
            f"the traced request got no answer: {type(error).__name__} {error}".rstrip(),
            where=plan.router_url,
            next_step=f"pdlaunch logs {plan.name}",
        ) from error
    # Engines number the prompts of a request.
    return f"{name}-0", ClientTimes(sent_ns, *pieces_ns[:2])
