"""What Prometheus and Grafana need to watch a deployment. Pure: data in, documents out.

Every query names metrics that engines and router export: a test holds them to recorded pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pdlaunch.plan import DeploymentPlan, ProcessPlan
from pdlaunch.recipe_checks import Role
from pdlaunch.render.documents import Document

# Labels of targets, named so that they hide none of vLLM's own: one of those is `role`.
ROLE_LABEL = "pd_role"
DEPLOYMENT_LABEL = "pd_deployment"

SCRAPE_INTERVAL_S = 15

# Grafana takes a dashboard with a known id for a new version of that dashboard.
DASHBOARD_UID = "pdlaunch"

_WIDTH_COLUMNS = 24
_PANELS_A_ROW = 3
_HEIGHT = 8


@dataclass(frozen=True)
class Query:
    """One line of a panel, or several: one for each set of labels that it groups by."""

    expression: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """A time series. The unit is one of Grafana's."""

    title: str
    unit: str
    description: str
    queries: tuple[Query, ...]


@dataclass(frozen=True)
class AdapterRule:
    """How an autoscaler's metric comes out of a series; names there have no colons."""

    metric: str
    series: str
    matchers: str = ""


# What each role has too little of first: prefill is short of compute, so prompts queue; decode is
# short of KV cache.
SCALING_METRICS: dict[Role, AdapterRule] = {
    "prefill": AdapterRule(
        "vllm_requests_waiting_for_capacity",
        "vllm:num_requests_waiting_by_reason",
        'reason="capacity"',
    ),
    "decode": AdapterRule("vllm_kv_cache_usage", "vllm:kv_cache_usage_perc"),
}


def _series(name: str, role: str = "", **labels: str) -> str:
    wanted = {DEPLOYMENT_LABEL: "$deployment"} | ({ROLE_LABEL: role} if role else {}) | labels
    return name + "{" + ",".join(f'{label}="{value}"' for label, value in wanted.items()) + "}"


def _rate(name: str, role: str = "", by: str = "", **labels: str) -> str:
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (rate({_series(name, role, **labels)}[$__rate_interval]))"


def _quantiles(name: str, role: str, what: str = "") -> tuple[Query, ...]:
    buckets = _rate(f"{name}_bucket", role, by="le")
    return tuple(
        Query(f"histogram_quantile({quantile}, {buckets})", f"{what} p{quantile[2:]}".strip())
        for quantile in ("0.50", "0.90", "0.99")
    )


def _mean(name: str, role: str, legend: str) -> Query:
    return Query(f"{_rate(f'{name}_sum', role)} / {_rate(f'{name}_count', role)}", legend)


_ENGINE = f"{{{{{ROLE_LABEL}}}}} {{{{instance}}}}"

ROWS: dict[str, tuple[Panel, ...]] = {
    "What clients see": (
        Panel(
            "Requests ended",
            "reqps",
            "By the reason for which decode ended them.",
            (
                Query(
                    _rate("vllm:request_success_total", "decode", by="finished_reason"),
                    "{{finished_reason}}",
                ),
            ),
        ),
        Panel(
            "Time to first token",
            "s",
            "From a request's arrival at decode: prefill and the transfer are in it.",
            _quantiles("vllm:time_to_first_token_seconds", "decode"),
        ),
        Panel(
            "Time between tokens",
            "s",
            "Of decode.",
            _quantiles("vllm:inter_token_latency_seconds", "decode"),
        ),
        Panel(
            "Tokens per second",
            "short",
            "Prompts at prefill, answers at decode.",
            (
                Query(_rate("vllm:prompt_tokens_total", "prefill"), "prompt"),
                Query(_rate("vllm:generation_tokens_total", "decode"), "answer"),
            ),
        ),
        Panel(
            "Requests at the router",
            "reqps",
            "By route.",
            (Query(_rate("vllm_router_pd_requests_total", "router", by="route"), "{{route}}"),),
        ),
        Panel(
            "Engines that the router finds healthy",
            "short",
            "1: it sends requests there.",
            (Query(_series("vllm_router_worker_health", "router"), "{{worker}}"),),
        ),
    ),
    "Load": (
        Panel(
            "Requests that run",
            "short",
            "Each engine's.",
            (Query(_series("vllm:num_requests_running"), _ENGINE),),
        ),
        Panel(
            "Requests that wait",
            "short",
            "capacity: for a place in the batch. deferred: at decode, mostly for KV.",
            (
                Query(
                    f"sum by ({ROLE_LABEL}, reason) "
                    f"({_series('vllm:num_requests_waiting_by_reason')})",
                    f"{{{{{ROLE_LABEL}}}}} {{{{reason}}}}",
                ),
            ),
        ),
        Panel(
            "KV cache in use",
            "percentunit",
            "Each engine's. A decode engine that has none left takes no new requests.",
            (Query(_series("vllm:kv_cache_usage_perc"), _ENGINE),),
        ),
        Panel(
            "Time in the queue",
            "s",
            "Of prefill: too few engines show here first.",
            _quantiles("vllm:request_queue_time_seconds", "prefill"),
        ),
        Panel(
            "Prefix cache hits",
            "percentunit",
            "Share of a prompt's tokens that an engine had in its own cache.",
            (
                Query(
                    f"{_rate('vllm:prefix_cache_hits_total', by=ROLE_LABEL)} / "
                    f"{_rate('vllm:prefix_cache_queries_total', by=ROLE_LABEL)}",
                    f"{{{{{ROLE_LABEL}}}}}",
                ),
            ),
        ),
        Panel(
            "Preemptions",
            "ops",
            "Requests that lost their KV to others.",
            (Query(_rate("vllm:num_preemptions_total", by=ROLE_LABEL), f"{{{{{ROLE_LABEL}}}}}"),),
        ),
    ),
    "Push": (
        Panel(
            "KV pushed",
            "Bps",
            "By whether the prompt's prefill had ended. After it, clients wait for the bytes.",
            (Query(_rate("vllm:nixl_push_bytes_total", "prefill", by="phase"), "{{phase}}"),),
        ),
        Panel(
            "KV pushed during prefill",
            "percentunit",
            "Share of all bytes.",
            (
                Query(
                    f"{_rate('vllm:nixl_push_bytes_total', 'prefill', phase='during_prefill')} / "
                    f"{_rate('vllm:nixl_push_bytes_total', 'prefill')}",
                    "share",
                ),
            ),
        ),
        Panel(
            "Transfer after prefill",
            "s",
            "From the end of prefill, or the registration if later, to the last WRITE's landing.",
            _quantiles("vllm:nixl_push_after_prefill_seconds", "prefill"),
        ),
        Panel(
            "Speed of a WRITE",
            "Bps",
            "Bytes over the time that WRITEs took. TCP in place of EFA shows here.",
            (
                Query(
                    f"{_rate('vllm:nixl_push_bytes_total', 'prefill', by='phase')} / "
                    f"{_rate('vllm:nixl_push_write_seconds_total', 'prefill', by='phase')}",
                    "{{phase}}",
                ),
            ),
        ),
        Panel(
            "Registrations",
            "ops",
            "Before prefill's end is what makes push fast.",
            (Query(_rate("vllm:nixl_push_registrations_total", by="side"), "{{side}}"),),
        ),
        Panel(
            "In flight",
            "short",
            "Registrations that have not ended, by state; prefills kept for decode; WRITEs.",
            (
                Query(
                    f"sum by (state) ({_series('vllm:nixl_push_num_registrations')})", "{{state}}"
                ),
                Query(f"sum ({_series('vllm:nixl_push_num_prefills_held')})", "prefills held"),
                Query(f"sum ({_series('vllm:nixl_push_num_writes_in_flight')})", "WRITEs"),
            ),
        ),
        Panel(
            "First tokens of prefill",
            "ops",
            "taken: decode gave the one that prefill had sent to the client.",
            (
                Query(
                    _rate("vllm:nixl_push_first_tokens_total", "decode", by="outcome"),
                    "{{outcome}}",
                ),
            ),
        ),
        Panel(
            "Transfers",
            "ops",
            "As decode saw them end.",
            (
                Query(
                    _rate("vllm:nixl_push_transfers_total", "decode", by="outcome"), "{{outcome}}"
                ),
            ),
        ),
        Panel(
            "Failed transfers",
            "ops",
            "By reason, on both sides. The engines' logs have the requests.",
            (
                Query(
                    _rate(
                        "vllm:nixl_push_transfers_total",
                        by=f"{ROLE_LABEL}, reason",
                        outcome="failed",
                    ),
                    f"{{{{{ROLE_LABEL}}}}} {{{{reason}}}}",
                ),
            ),
        ),
        Panel(
            "Peers that fell silent, messages dropped",
            "ops",
            "Anything but zero deserves a look at the network and at the other side's log.",
            (
                Query(
                    _rate("vllm:nixl_push_liveness_failures_total", by=ROLE_LABEL),
                    f"{{{{{ROLE_LABEL}}}}} silent or gone",
                ),
                Query(_rate("vllm:nixl_push_hangs_total", "decode"), "decode hangs"),
                Query(
                    _rate("vllm:nixl_push_dropped_messages_total", by=f"{ROLE_LABEL}, reason"),
                    f"{{{{{ROLE_LABEL}}}}} {{{{reason}}}}",
                ),
            ),
        ),
        Panel(
            "Fences",
            "ops",
            "Cancels that prefill answered, and preemptions that waited for WRITEs.",
            (Query(_rate("vllm:nixl_push_fences_total", "prefill", by="kind"), "{{kind}}"),),
        ),
    ),
    "NIXL, in every mode": (
        Panel(
            "Bytes",
            "Bps",
            "By the side that issues the transfer: prefill in push, decode in pull.",
            (
                Query(
                    _rate("vllm:nixl_bytes_transferred_sum", by=ROLE_LABEL),
                    f"{{{{{ROLE_LABEL}}}}}",
                ),
            ),
        ),
        Panel(
            "Time of a transfer",
            "s",
            "Mean, and the part of it that posting took.",
            (
                _mean("vllm:nixl_xfer_time_seconds", "", "transfer"),
                _mean("vllm:nixl_post_time_seconds", "", "post"),
            ),
        ),
        Panel(
            "Descriptors of a transfer",
            "short",
            "Mean. Blocks that lie scattered need more of them.",
            (_mean("vllm:nixl_num_descriptors", "", "descriptors"),),
        ),
        Panel(
            "Failures",
            "ops",
            "KV expired: nobody fetched it in time.",
            (
                Query(_rate("vllm:nixl_num_failed_transfers_total"), "transfers"),
                Query(_rate("vllm:nixl_num_failed_notifications_total"), "notifications"),
                Query(_rate("vllm:nixl_num_kv_expired_reqs_total"), "KV expired"),
            ),
        ),
    ),
}


def dashboard() -> dict[str, Any]:
    """The Grafana dashboard, for import. It has the deployment and the source as variables."""
    return {
        "uid": DASHBOARD_UID,
        "title": "pdlaunch: prefill and decode",
        "tags": ["pdlaunch", "vllm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": list(_panels()),
    }


def scrape_configuration(plan: DeploymentPlan) -> Document:
    """Prometheus's configuration for the processes of a plan."""
    return Document(
        {
            "scrape_configs": [
                {
                    "job_name": f"pdlaunch-{plan.name}",
                    "scrape_interval": f"{SCRAPE_INTERVAL_S}s",
                    "static_configs": [
                        {
                            "targets": [_target(process)],
                            "labels": {DEPLOYMENT_LABEL: plan.name, ROLE_LABEL: process.role},
                        }
                        for process in plan.processes
                    ],
                }
            ]
        },
        "For processes and containers on hosts; in a cluster, the PodMonitor does this.",
    )


def adapter_rules() -> Document:
    """prometheus-adapter's rules for the metrics that autoscalers ask for."""
    rules = [
        {
            "seriesQuery": f'{rule.series}{{namespace!="",pod!=""}}',
            "resources": {
                "overrides": {
                    "namespace": {"resource": "namespace"},
                    "pod": {"resource": "pod"},
                }
            },
            "name": {"matches": "^.*$", "as": rule.metric},
            "metricsQuery": "sum by (<<.GroupBy>>) (<<.Series>>{"
            + ",".join(each for each in ("<<.LabelMatchers>>", rule.matchers) if each)
            + "})",
        }
        for rule in SCALING_METRICS.values()
    ]
    return Document(
        {"rules": {"custom": rules}}, "Values of the prometheus-adapter chart, for autoscaling."
    )


def _target(process: ProcessPlan) -> str:
    port = process.metrics_port or process.port
    return f"[{process.host}]:{port}" if ":" in process.host else f"{process.host}:{port}"


def _variables() -> list[dict[str, Any]]:
    return [
        {"name": "source", "label": "Source", "type": "datasource", "query": "prometheus"},
        {
            "name": "deployment",
            "label": "Deployment",
            "type": "query",
            "datasource": _SOURCE,
            "query": f"label_values(vllm:num_requests_running, {DEPLOYMENT_LABEL})",
            "refresh": 2,
        },
    ]


_SOURCE = {"type": "prometheus", "uid": "${source}"}


def _panels() -> Iterator[dict[str, Any]]:
    width = _WIDTH_COLUMNS // _PANELS_A_ROW
    number, top = 0, 0
    for title, panels in ROWS.items():
        number += 1
        place = {"x": 0, "y": top, "w": _WIDTH_COLUMNS, "h": 1}
        yield {"id": number, "type": "row", "title": title, "gridPos": place, "panels": []}
        top += 1
        for position, panel in enumerate(panels):
            number += 1
            line, column = divmod(position, _PANELS_A_ROW)
            yield {
                "id": number,
                "type": "timeseries",
                "title": panel.title,
                "description": panel.description,
                "datasource": _SOURCE,
                "gridPos": {
                    "x": column * width,
                    "y": top + line * _HEIGHT,
                    "w": width,
                    "h": _HEIGHT,
                },
                "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
                "targets": [
                    {
                        "refId": chr(ord("A") + index),
                        "datasource": _SOURCE,
                        "expr": query.expression,
                        "legendFormat": query.legend,
                    }
                    for index, query in enumerate(panel.queries)
                ],
            }
        top += _HEIGHT * -(-len(panels) // _PANELS_A_ROW)
