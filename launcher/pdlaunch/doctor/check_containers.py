"""Judges what containers need of the hosts that are to run them. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from pdlaunch.doctor.facts import Deployment, Facts
from pdlaunch.doctor.findings import Finding, error, ok, warning


def images(facts: Facts, deployment: Deployment | None) -> Iterator[Finding]:
    """Whether each daemon answers and has the image, and one that fits."""
    if deployment is None:
        return
    wanted = deployment.plan.engine_version
    for image in facts.images:
        if image.problem is not None:
            yield error("docker", image.problem, image.remedy or "mend it", where="docker.image")
        elif image.version != wanted:
            yield warning(
                "docker",
                f"{image.name} at {image.endpoint} holds vLLM {image.version or '(unknown)'}, "
                f"and this is pdlaunch for {wanted}",
                "pdlaunch build image, and bring the image to all hosts",
                where="docker.image",
            )
        else:
            yield ok("docker", f"{image.endpoint} answers and has {image.name}, vLLM {wanted}")
