"""Golden files: what recipes of production come out as, whole. `make golden` writes them anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pdlaunch import recipe_loader
from pdlaunch.planner import Facts, ModelLocation, plan, ports_needed
from pdlaunch.render import cluster, documents, kubernetes, monitoring, shell
from rendering import ENGINE, settings

FOLDER = Path(__file__).parent / "golden"
P5EN = "qwen3-32b-p5en"


def commands() -> str:
    """What `pdlaunch up --dry-run` prints on the prefill instance."""
    recipe = recipe_loader.load(recipe_loader.find(P5EN), ()).recipe
    facts = Facts(
        launch_id="1234abcd",
        cores=tuple(range(192)),
        gpus=tuple(map(str, range(8))),
        free_ports=tuple(range(20000, 20000 + ports_needed(recipe))),
        local_addresses=frozenset({"127.0.0.1", recipe.prefill.host}),
        routable_address=recipe.prefill.host,
        resolved={},
    )
    return shell.commands(plan(recipe, facts, ENGINE, ModelLocation(recipe.model, False))) + "\n"


def manifests() -> str:
    """What `pdlaunch render k8s` prints."""
    recipe = recipe_loader.load(recipe_loader.find(P5EN), ()).recipe
    chosen = settings(cluster.name_of(recipe))
    made = cluster.planned(recipe, chosen, ENGINE, ModelLocation(recipe.model, False))
    return documents.dump(kubernetes.documents(recipe, made, chosen))


def scraping() -> str:
    """What `pdlaunch render monitoring` writes for Prometheus."""
    recipe = recipe_loader.load(recipe_loader.find(P5EN), ()).recipe
    facts = Facts("", (), None, (), frozenset(), recipe.prefill.host, {})
    made = plan(recipe, facts, ENGINE, ModelLocation(recipe.model, False))
    return documents.dump([monitoring.scrape_configuration(made)])


FILES: dict[str, Callable[[], str]] = {
    f"{P5EN}.dry-run.sh": commands,
    f"{P5EN}.k8s.yaml": manifests,
    f"{P5EN}.prometheus.yaml": scraping,
}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, make in FILES.items():
        (FOLDER / name).write_text(make(), encoding="utf-8")
