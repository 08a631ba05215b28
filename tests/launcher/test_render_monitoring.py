"""The dashboard and what Prometheus gets, against what real engines and a real router export.

record_metrics.py made the pages, from tiny-qwen3-cpu after a few requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import psutil
import pytest
import yaml
from click.testing import CliRunner

from pdlaunch import deployments, leftovers
from pdlaunch.cli import cli
from pdlaunch.deployments import Record
from pdlaunch.engine_metrics import Metrics
from pdlaunch.errors import UsageError
from pdlaunch.paths import recipes_dir
from pdlaunch.render import monitoring
from record_metrics import RECORDED
from test_docs import table
from test_planner import planned, recipe

PAGES = {role: (RECORDED / f"{role}.txt").read_text() for role in ("prefill", "decode", "router")}
TARGET_LABELS = {monitoring.ROLE_LABEL, monitoring.DEPLOYMENT_LABEL, "instance"}


def targets() -> Iterator[tuple[str, str, str]]:
    """Panel, query and legend."""
    for panel in monitoring.dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"], target["legendFormat"]


QUERIES = [(f"{title}: {legend}", query, legend) for title, query, legend in targets()]


def parsed(query: str) -> Any:
    return promql_parser.parse(query.replace("$__rate_interval", "1m"))


def walk(node: Any) -> Iterator[Any]:
    """A query's parts, itself included."""
    yield node
    match node:
        case promql_parser.Call():
            inner = node.args
        case promql_parser.AggregateExpr() | promql_parser.ParenExpr():
            inner = [node.expr]
        case promql_parser.BinaryExpr():
            inner = [node.lhs, node.rhs]
        case promql_parser.MatrixSelector():
            inner = [node.vector_selector]
        case _:
            inner = []
    for each in inner:
        yield from walk(each)


def selectors(query: str) -> Iterator[tuple[str, dict[str, str]]]:
    for node in walk(parsed(query)):
        if isinstance(node, promql_parser.VectorSelector):
            assert all(each.op == promql_parser.MatchOp.Equal for each in node.matchers.matchers)
            yield node.name, {each.name: each.value for each in node.matchers.matchers}


def groupings(query: str) -> set[str]:
    return {
        label
        for node in walk(parsed(query))
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None
        for label in node.modifier.labels
    }


def matching(name: str, labels: dict[str, str]) -> list[dict[str, str]]:
    """The labels of the recorded samples that a selector finds."""
    role = labels.get(monitoring.ROLE_LABEL)
    wanted = {key: value for key, value in labels.items() if key not in TARGET_LABELS}
    return [
        dict(sample.labels)
        for page_role, page in PAGES.items()
        if role in (None, page_role)
        for sample in Metrics.parse(page).samples
        if sample.name == name and wanted.items() <= sample.labels.items()
    ]


@pytest.mark.parametrize(
    ("query", "legend"), [each[1:] for each in QUERIES], ids=[each[0] for each in QUERIES]
)
def test_every_query_finds_what_engines_export(query: str, legend: str) -> None:
    found = list(selectors(query))
    assert found
    labels: set[str] = set()
    for name, matchers in found:
        assert matchers[monitoring.DEPLOYMENT_LABEL] == "$deployment"
        samples = matching(name, matchers)
        assert samples, f"{name} {matchers}"
        labels |= {label for sample in samples for label in sample}
    assert groupings(query) <= labels | TARGET_LABELS
    named = set(re.findall(r"{{(\w+)}}", legend))
    assert named <= (groupings(query) or labels | TARGET_LABELS)


def test_a_metric_that_nobody_exports_would_be_noticed() -> None:
    assert not matching("vllm:nixl_push_byte_total", {})
    assert not matching("vllm:request_success_total", {monitoring.ROLE_LABEL: "router"})


def test_counters_are_rated_and_gauges_are_not() -> None:
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", "".join(PAGES.values()), re.MULTILINE))
    for _, query, _ in QUERIES:
        rated = {
            node.vector_selector.name
            for node in walk(parsed(query))
            if isinstance(node, promql_parser.MatrixSelector)
        }
        for name, _ in selectors(query):
            histogram = re.sub(r"_(bucket|sum|count)$", "", name)
            kind = types.get(name) or types[histogram]
            assert (name in rated) == (kind != "gauge"), name


def test_recorded_pages_are_those_of_this_series() -> None:
    rows = table((Path(__file__).parents[2] / "README.md").read_text(), "metric")
    for name in (row[0].strip("`") for row in rows):
        for role in ("prefill", "decode"):
            assert f"# TYPE {name} " in PAGES[role], "record again: see record_metrics.py"


def test_every_metric_of_push_is_shown() -> None:
    exported = set(re.findall(r"^# TYPE (vllm:nixl_push_\w+)", PAGES["prefill"], re.MULTILINE))
    shown = {
        name.removesuffix("_bucket") for _, query, _ in QUERIES for name, _ in selectors(query)
    }
    assert len(exported) > 10
    assert exported <= shown


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    panels = monitoring.dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not cells & taken
        taken |= cells


def test_labels_of_targets_hide_none_of_vllm_s_own() -> None:
    own = {
        label
        for page in PAGES.values()
        for sample in Metrics.parse(page).samples
        for label in sample.labels
    }
    assert not TARGET_LABELS & own


def test_rules_for_autoscaling_find_what_engines_export() -> None:
    for role, rule in monitoring.SCALING_METRICS.items():
        matchers = dict(re.findall(r'(\w+)="(\w+)"', rule.matchers))
        assert matching(rule.series, {monitoring.ROLE_LABEL: role, **matchers})
        # Names with colons cannot be asked for.
        assert re.fullmatch(r"[a-z_]+", rule.metric)


def test_rules_for_autoscaling_are_queries() -> None:
    rules = monitoring.adapter_rules().body["rules"]["custom"]
    for rule in rules:
        promql_parser.parse(rule["seriesQuery"])
        filled = (
            rule["metricsQuery"]
            .replace("<<.GroupBy>>", "pod")
            .replace("<<.Series>>", "series")
            .replace("<<.LabelMatchers>>", 'namespace="a"')
        )
        promql_parser.parse(filled)
    assert len(rules) == 2


def test_command_writes_a_dashboard_and_the_addresses_of_hosts(tmp_path: Path) -> None:
    out = tmp_path / "monitoring"
    result = CliRunner().invoke(cli, ["render", "monitoring", "qwen3-32b-p5en", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        str(out / name)
        for name in ("grafana-dashboard.json", "prometheus.yaml", "prometheus-adapter.yaml")
    ]
    dashboard = json.loads((out / "grafana-dashboard.json").read_text())
    assert dashboard == monitoring.dashboard()
    (job,) = yaml.safe_load((out / "prometheus.yaml").read_text())["scrape_configs"]
    found = {static["labels"]["pd_role"]: static["targets"] for static in job["static_configs"]}
    assert found == {
        "prefill": ["10.0.0.11:8100"],
        "decode": ["10.0.0.12:8200"],
        "router": ["10.0.0.11:29000"],
    }


def test_ports_that_are_chosen_at_start_are_no_targets(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        cli, ["render", "monitoring", "smollm2-135m-cpu", "--out", str(tmp_path / "none")]
    )
    assert isinstance(result.exception, UsageError)
    assert "prefill.port" in str(result.exception)
    assert not (tmp_path / "none").exists()


def test_a_deployment_that_runs_gives_the_ports_that_it_has(state: Path, tmp_path: Path) -> None:
    plan = planned(recipe(name="running"))
    me = psutil.Process()
    deployments.create_folder(plan.name)
    deployments.write(
        Record(
            plan=plan,
            state="ready",
            supervisor_pid=me.pid,
            supervisor_born_s=leftovers.born_s(me),
            started_unix_s=0,
            pids={},
            restarts={},
        )
    )
    out = tmp_path / "monitoring"
    result = CliRunner().invoke(cli, ["render", "monitoring", "running", "--out", str(out)])
    assert result.exit_code == 0, result.output
    (job,) = yaml.safe_load((out / "prometheus.yaml").read_text())["scrape_configs"]
    assert [static["targets"] for static in job["static_configs"]] == [
        [f"127.0.0.1:{process.metrics_port or process.port}"] for process in plan.processes
    ]


def test_a_recipe_by_its_whole_path_is_no_deployment_s_name(state: Path, tmp_path: Path) -> None:
    path = recipes_dir().resolve() / "qwen3-32b-p5en.yaml"
    result = CliRunner().invoke(
        cli, ["render", "monitoring", str(path), "--out", str(tmp_path / "monitoring")]
    )
    assert result.exit_code == 0, result.output
