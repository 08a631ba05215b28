"""Golden files: what recipes of production come out as, whole. `make golden` writes them anew."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pdlaunch
from pdlaunch import draining, planner, recipe_loader
from pdlaunch.plan import DeploymentPlan
from pdlaunch.planner import Facts, ModelLocation, ports_needed
from pdlaunch.recipe import LOCAL_HOST, Recipe
from pdlaunch.render import cluster, compose, documents, kubernetes, monitoring, shell
from rendering import ENGINE, settings

FOLDER = Path(__file__).parent / "golden"
P5EN = "qwen3-32b-p5en"


def commands(name: str) -> str:
    """What `pdlaunch up --dry-run` prints on the prefill instance."""
    recipe = loaded(name)
    here = "192.0.2.1" if recipe.prefill.host == LOCAL_HOST else recipe.prefill.host
    made = draining.drainable(planned(recipe, here, gpus=8))
    # Wherever pdlaunch is installed.
    package = str(Path(pdlaunch.__file__).parent)
    return shell.commands(made).replace(package, "/pdlaunch") + "\n"


def manifests(name: str) -> str:
    """What `pdlaunch render k8s` prints."""
    recipe = loaded(name)
    chosen = settings(cluster.name_of(recipe))
    made = cluster.planned(recipe, chosen, ENGINE, location(recipe))
    return documents.dump(kubernetes.documents(recipe, made, chosen))


def compose_file(name: str) -> str:
    """What `pdlaunch render compose` prints."""
    image = "docker.image=registry.example/pdlaunch:1"
    fixed = compose.with_fixed_ports(loaded(name, image))
    made = planned(fixed, "192.0.2.1", gpus=None)
    return documents.dump(compose.documents(fixed, made))


def scraping(name: str) -> str:
    """What `pdlaunch render monitoring` writes for Prometheus."""
    recipe = loaded(name)
    facts = Facts("", (), None, (), frozenset(), recipe.prefill.host, {})
    made = planner.plan(recipe, facts, ENGINE, location(recipe))
    return documents.dump([monitoring.scrape_configuration(made)])


def loaded(name: str, *overrides: str) -> Recipe:
    return recipe_loader.load(recipe_loader.find(name), overrides).recipe


def location(recipe: Recipe) -> ModelLocation:
    if ":" in recipe.model:
        return ModelLocation(f"/cache/models/{recipe.client_model_name}", is_local=True)
    return ModelLocation(recipe.model, is_local=False)


def planned(recipe: Recipe, here: str, gpus: int | None) -> DeploymentPlan:
    """The plan on a machine of that address; None: what devices it has is not known."""
    facts = Facts(
        launch_id="1234abcd",
        cores=tuple(range(4)),
        gpus=None if gpus is None else tuple(map(str, range(gpus))),
        free_ports=tuple(range(20000, 20000 + ports_needed(recipe))),
        local_addresses=frozenset({"127.0.0.1", here}),
        routable_address=here,
        resolved={},
    )
    return planner.plan(recipe, facts, ENGINE, location(recipe))


KINDS: dict[str, tuple[Callable[[str], str], tuple[str, ...]]] = {
    "dry-run.sh": (
        commands,
        (
            P5EN,
            "qwen3-32b-p5",
            "llama-3.3-70b-p5en",
            "qwen3-0.6b-one-gpu",
            "tiny-qwen3-2p2d-cpu",
            "qwen3-32b-trn2",
            "qwen3-32b-trn2-host-buffer",
        ),
    ),
    "k8s.yaml": (manifests, (P5EN, "llama-3.3-70b-p5en", "deepseek-v3.1-p5")),
    "compose.yaml": (compose_file, ("qwen3-0.6b-one-gpu",)),
    "prometheus.yaml": (scraping, (P5EN,)),
}
FILES: dict[str, Callable[[], str]] = {
    f"{name}.{kind}": partial(make, name) for kind, (make, names) in KINDS.items() for name in names
}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, make in FILES.items():
        (FOLDER / name).write_text(make(), encoding="utf-8")
