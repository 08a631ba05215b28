"""What another recipe would change of a running deployment, and whether that can be done while it
runs. Pure; asks and restarts nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pydantic import JsonValue

from pdlaunch.plan import DeploymentPlan

# Old and new engines work side by side meanwhile, so they must agree on model, blocks and transfer,
# and on where they are. A trailing dot: all keys of a section.
_APPLICABLE = (
    *("engine.args", "engine.env", "max_model_len_tokens"),
    *(
        f"{role}.{key}"
        for role in ("prefill", "decode")
        for key in (
            *("args", "env", "kv_cache_gib", "gpu_memory_fraction", "max_model_len_tokens"),
            *("cores", "restart."),
        )
    ),
    *("router.policy", "router.args", "router.env", "router.restart."),
    *("restarts_per_hour", "timeouts."),
)


@dataclass(frozen=True)
class Change:
    """A key of the recipe with two values."""

    key: str
    old: JsonValue
    new: JsonValue

    @property
    def is_applicable(self) -> bool:
        return any(
            self.key.startswith(key) if key.endswith(".") else f"{self.key}.".startswith(f"{key}.")
            for key in _APPLICABLE
        )


@dataclass(frozen=True)
class Differences:
    """All that is different."""

    changes: tuple[Change, ...]
    # Processes that would run otherwise.
    processes: tuple[str, ...]
    # Of the running one and of the new one, where they are not the same.
    engines: tuple[str, str] | None

    def __bool__(self) -> bool:
        return bool(self.changes or self.processes or self.engines)

    @property
    def in_the_way(self) -> tuple[str, ...]:
        """What cannot be changed while it runs."""
        keys = tuple(change.key for change in self.changes if not change.is_applicable)
        return keys if self.engines is None else (*keys, "the engine itself")


def differences(running: DeploymentPlan, wanted: DeploymentPlan) -> Differences:
    """Compare what runs with the plan of another recipe for it."""
    old, new = dict(_flat(running.recipe)), dict(_flat(wanted.recipe))
    keys = [*old, *(key for key in new if key not in old)]
    was = {process.name: process for process in running.processes}
    versions = running.engine_version, wanted.engine_version
    return Differences(
        tuple(
            Change(key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)
        ),
        tuple(each.name for each in wanted.own if was.get(each.name) != each),
        None if versions[0] == versions[1] else versions,
    )


def _flat(section: Mapping[str, JsonValue], at: str = "") -> Iterator[tuple[str, JsonValue]]:
    for name, value in section.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{at}{name}.")
        else:
            yield f"{at}{name}", None if value == {} else value
