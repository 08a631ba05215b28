"""Plans a benchmark: which deployments, in which order, under which loads. Pure: starts nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from pdlaunch.bench.workload import Load
from pdlaunch.errors import UsageError
from pdlaunch.plan import DeploymentPlan, TransferMode
from pdlaunch.recipe import Recipe

ONE_ENGINE: Final = "one-engine"
Subject = Literal["push", "pull", "push-upstream", "one-engine"]
MODES: tuple[TransferMode, ...] = ("pull", "push-upstream", "push")

# Rough figures of a small CPU machine, for a first idea of how long a run takes.
_BRING_UP_S = 40.0
_VISIT_S = 10.0
_PREFILL_TOKENS_PER_S = 1600.0
_DECODE_STEP_S = 0.025
# More at a time share the same cores: a step of many takes longer than a step of one.
_STEP_GROWTH = 0.25


@dataclass(frozen=True)
class Visit:
    """One deployment, brought up once, under all loads, and taken down."""

    round: int
    subject: Subject


@dataclass(frozen=True)
class Schedule:
    """A whole run. Every round has every subject once, each round in another order."""

    modes: tuple[TransferMode, ...]
    loads: tuple[Load, ...]
    rounds: int
    visits: tuple[Visit, ...]

    def seed(self, load: Load, number: int) -> int:
        """Of a load's prompts in a round: the same for all subjects, others in every round."""
        return number * len(self.loads) + self.loads.index(load)

    @property
    def expected_s(self) -> float:
        """A first idea of how long it takes, off by a factor of two on other machines."""
        return len(self.visits) * (
            _BRING_UP_S + _VISIT_S + sum(expected_s(load) for load in self.loads)
        )


def schedule(modes: Sequence[TransferMode], loads: Sequence[Load], rounds: int) -> Schedule:
    """Rounds of all modes and of one engine without P/D.

    Pairs are not up side by side: stock engines take their cores even when idle. The order rotates,
    so that what drifts, such as a machine that gets warm or busy, hits all alike.
    """
    subjects: tuple[Subject, ...] = (ONE_ENGINE, *modes)
    visits = tuple(
        Visit(number, subjects[(number + place) % len(subjects)])
        for number in range(rounds)
        for place in range(len(subjects))
    )
    return Schedule(tuple(modes), tuple(loads), rounds, visits)


def expected_s(load: Load) -> float:
    """Roughly how long a load takes."""
    if load.requests_per_s is not None:
        return load.requests / load.requests_per_s
    at_once = load.at_once or 1
    step_s = _DECODE_STEP_S * (1 + _STEP_GROWTH * (at_once + load.busy_decodes - 1))
    prefill_s = load.requests * load.prompt_tokens / _PREFILL_TOKENS_PER_S
    return prefill_s + load.requests / at_once * load.answer_tokens * step_s


def modes_of(text: str) -> tuple[TransferMode, ...]:
    """The modes that a list with commas names."""
    found: list[TransferMode] = []
    for name in (each.strip() for each in text.split(",")):
        mode = next((mode for mode in MODES if mode == name), None)
        if mode is None:
            raise UsageError(
                f"no transfer mode {name!r}",
                where="--modes",
                next_step=f"one of: {', '.join(MODES)}",
            )
        if mode not in found:
            found.append(mode)
    return tuple(found)


def check_measurable(recipe: Recipe, plan: DeploymentPlan) -> None:
    """Raise where a recipe is none for one machine."""
    elsewhere = [process for process in plan.processes if not process.is_here]
    if elsewhere:
        process = elsewhere[0]
        raise UsageError(
            f"bench measures on one machine, and {process.name} belongs to {process.host}",
            where=f"{process.role}.host",
            next_step=f"override it: --set {process.role}.host=local, or take another recipe",
        )
    if recipe.prefill.replicas != 1 or recipe.decode.replicas != 1:
        raise UsageError(
            "bench measures one prefill and one decode engine against one engine",
            where="prefill.replicas and decode.replicas",
            next_step="override them: --set prefill.replicas=1 --set decode.replicas=1",
        )


def alone(plan: DeploymentPlan) -> DeploymentPlan:
    """The prefill engine of a plan as an engine without P/D: on its cores, without a connector.

    It answers whole requests, which is what P/D must beat, and alone gives the first token at the
    earliest moment that there is, the floor.
    """
    (prefill,) = plan.of_role("prefill")
    at = prefill.argv.index("--kv-transfer-config")
    engine = prefill.model_copy(
        update={"name": "engine", "argv": prefill.argv[:at] + prefill.argv[at + 2 :]}
    )
    # `only`: there are no legs to prove, and no router.
    return plan.model_copy(update={"processes": (engine,), "only": "prefill"})
