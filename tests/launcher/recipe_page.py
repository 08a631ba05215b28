"""docs/recipe.md, made from the schema of recipes. `make pages` writes it anew."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pdlaunch import recipe_schema

PAGE = Path(__file__).parents[2] / "docs" / "recipe.md"

HEAD = """# Keys of a recipe

Written by `make pages` from `pdlaunch recipe schema`: every key of a recipe, what it may be, and
what it is where a recipe does not say. Only `name` and `model` are required.
[reference.yaml](../recipes/reference.yaml) is a recipe with all of them;
`pdlaunch new` writes one from a few answers.

A key below a section is written with a dot: `pdlaunch up RECIPE --set prefill.tensor_parallel=2`.
What one key says of another, such as layouts, ports and devices, `pdlaunch recipe validate` checks.
"""

_TYPES = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "array": "list",
    "object": "mapping",
    "null": "null",
}


def page() -> str:
    schema = recipe_schema.schema()
    sections = {
        name: recipe_schema.section_of(part, schema["$defs"])
        for name, part in schema["properties"].items()
    }
    tops = {name: part for name, part in schema["properties"].items() if sections[name] is None}
    parts = [HEAD, "## Top level\n", _table(tops, schema["$defs"])]
    for name, part in schema["properties"].items():
        section = sections[name]
        if section is not None:
            about = part.get("description", section["description"])
            parts += [
                f"## `{name}`\n",
                f"{about}\n",
                _table(section["properties"], schema["$defs"]),
            ]
    return "\n".join(parts)


def _table(keys: Mapping[str, Mapping[str, Any]], sections: Mapping[str, Mapping[str, Any]]) -> str:
    rows = ["| key | value | default | what | example |", "|---|---|---|---|---|"]
    for name, part in _flat(keys, sections):
        cells = (
            f"`{name}`",
            " or ".join(_kinds(part)),
            _default(part),
            part["description"],
            ", ".join(_code(example) for example in part.get("examples", ())),
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _flat(
    keys: Mapping[str, Mapping[str, Any]], sections: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The keys, with those of a section in place of it."""
    for name, part in keys.items():
        below = recipe_schema.section_of(part, sections)
        if below is None:
            yield name, part
        else:
            yield from ((f"{name}.{key}", each) for key, each in below["properties"].items())


def _kinds(part: Mapping[str, Any]) -> Iterator[str]:
    """What may stand there, in words."""
    for each in part.get("anyOf", (part,)):
        if "enum" in each:
            yield ", ".join(_code(value) for value in each["enum"])
            continue
        items = each.get("items", {}).get("type")
        kind = _TYPES[each["type"]]
        yield f"{kind} of {_TYPES[items]}s" if items in ("array", "string") else kind + _range(each)


def _range(part: Mapping[str, Any]) -> str:
    low, above, high = (part.get(key) for key in ("minimum", "exclusiveMinimum", "maximum"))
    words = []
    if low is not None:
        words.append(f"from {low}")
    if above is not None:
        words.append(f"above {above}")
    if high is not None:
        words.append(f"to {high}")
    return f" {' '.join(words)}" if words else ""


def _default(part: Mapping[str, Any]) -> str:
    if "default" in part:
        return _code(part["default"])
    return "none" if part.get("type") == "object" else "required"


def _code(value: Any) -> str:
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
