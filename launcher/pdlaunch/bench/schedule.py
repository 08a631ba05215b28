"""Plans a benchmark: which deployments, in which order, under which loads. Pure: starts nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from pdlaunch.bench.workload import Load, Setup
from pdlaunch.errors import UsageError
from pdlaunch.plan import DeploymentPlan, TransferMode
from pdlaunch.recipe import Recipe

ONE_ENGINE: Final = "one-engine"
Subject = Literal["push", "pull", "push-upstream", "one-engine"]
MODES: tuple[TransferMode, ...] = ("pull", "push-upstream", "push")

# Of a tiny model on two CPU cores, for a first idea of how long a run takes.
_BRING_UP_S, _BRING_UP_ONE_S = 45.0, 30.0
# Warming up, an idle spell, taking down.
_VISIT_S = 16.0
_WAITING_S = 30.0
_SCATTERING_S = 60.0
_PREFILL_TOKENS_PER_S = 1200.0
_DECODE_STEP_S = 0.03
# More at a time share the same cores: a step of many takes longer than a step of one.
_STEP_GROWTH = 0.25


@dataclass(frozen=True)
class Visit:
    """One deployment, brought up once, under all loads of its setup, and taken down."""

    round: int
    subject: Subject
    setup: Setup
    loads: tuple[Load, ...]

    @property
    def expected_s(self) -> float:
        total_s = _VISIT_S + sum(expected_s(load) for load in self.loads)
        if self.subject == ONE_ENGINE:
            # The floor: the same prompts once more.
            floor_tokens = sum(load.requests * load.prompt_tokens for load in self.loads)
            total_s += _BRING_UP_ONE_S + floor_tokens / _PREFILL_TOKENS_PER_S
        else:
            # Its floors, before and after a load.
            single = [load for load in self.loads if load.is_one_at_a_time]
            floor_tokens = 2 * sum(load.requests * load.prompt_tokens for load in single)
            total_s += _BRING_UP_S + floor_tokens / _PREFILL_TOKENS_PER_S
        if any(load.scattered for load in self.loads):
            total_s += _SCATTERING_S
        return total_s + (_WAITING_S if self.setup.link_mbit_per_s else 0.0)


@dataclass(frozen=True)
class Schedule:
    """A whole run. A round has every subject once in each setup, each round in another order."""

    modes: tuple[TransferMode, ...]
    loads: tuple[Load, ...]
    rounds: int
    visits: tuple[Visit, ...]
    # Rounds after the first are left out where they would end later.
    within_s: float | None = None

    def has_time_for(self, number: int, took_s: float) -> bool:
        """Whether a round would end in time, at the pace of those before it.

        Args:
            took_s: what the rounds before it took.
        """
        if self.within_s is None or not number:
            return True
        before_s = sum(visit.expected_s for visit in self.visits if visit.round < number)
        round_s = sum(visit.expected_s for visit in self.visits if visit.round == number)
        return took_s * (1 + round_s / before_s) <= self.within_s

    def seed(self, load: Load, number: int) -> int:
        """Of a load's prompts in a round: the same for all subjects, others in every round."""
        return number * len(self.loads) + self.loads.index(load)

    @property
    def expected_s(self) -> float:
        """A first idea of how long it takes, off by a factor of two on other machines."""
        return sum(visit.expected_s for visit in self.visits)


def schedule(
    modes: Sequence[TransferMode],
    loads: Sequence[Load],
    rounds: int,
    within_s: float | None = None,
) -> Schedule:
    """Rounds of all modes and of one engine without P/D.

    Pairs are not up side by side: stock engines take their cores even when idle. The order rotates,
    so that what drifts, such as a machine that gets warm or busy, hits all alike.
    """
    subjects: tuple[Subject, ...] = (ONE_ENGINE, *modes)
    setups = tuple(dict.fromkeys(load.setup for load in loads))
    visits = []
    for number in range(rounds):
        alone: set[Setup] = set()
        for setup in setups:
            for place in range(len(subjects)):
                subject = subjects[(number + place) % len(subjects)]
                if subject != ONE_ENGINE:
                    here = tuple(load for load in loads if load.setup == setup)
                    visits.append(Visit(number, subject, setup, here))
                elif (on_one := setup.on_one_host) not in alone:
                    alone.add(on_one)
                    here = tuple(load for load in loads if load.setup.on_one_host == on_one)
                    visits.append(Visit(number, subject, on_one, here))
    return Schedule(tuple(modes), tuple(loads), rounds, tuple(visits), within_s)


def without_idle_settings(
    loads: Iterable[Load], is_change: Callable[[tuple[str, ...]], bool]
) -> tuple[Load, ...]:
    """The loads, without settings that the recipe has anyway: no deployment is brought up twice.

    Args:
        is_change: whether the recipe with these settings is another one.
    """
    changes: dict[tuple[str, ...], bool] = {}

    def reduced(load: Load) -> Load:
        settings = load.setup.settings
        if settings not in changes:
            changes[settings] = is_change(settings)
        return load if changes[settings] else replace(load, setup=replace(load.setup, settings=()))

    return tuple(reduced(load) for load in loads)


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
    """Raise where a recipe is none for processes of one machine."""
    if plan.endpoints:
        raise UsageError(
            "bench measures processes, whose CPU time it can tell, not containers",
            where="backend",
            next_step="override it: --set backend=process",
        )
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
