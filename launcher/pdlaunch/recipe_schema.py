"""The JSON Schema of recipes, which editors complete and check from. Pure; never reads recipes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from pdlaunch.recipe import Recipe


class _WithoutTitles(GenerateJsonSchema):
    """pydantic's titles would only say the keys again."""

    def field_title_should_be_set(self, *_: object) -> bool:
        return False


def schema() -> dict[str, Any]:
    """All that a recipe may say, key by key; rules over several keys are the loader's alone."""
    made = Recipe.model_json_schema(schema_generator=_WithoutTitles)
    for section in (made, *made["$defs"].values()):
        section.pop("title", None)
    return {"$schema": GenerateJsonSchema.schema_dialect, "title": "A pdlaunch recipe", **made}


def described_keys() -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """Every key that a recipe may have with what the schema says of it, sections before theirs."""
    made = schema()
    yield from _below(made, made["$defs"], ())


def _below(
    section: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]], at: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    for name, part in section["properties"].items():
        below = section_of(part, sections)
        yield (*at, name), {**(below or {}), **part}
        if below is not None:
            yield from _below(below, sections, (*at, name))


def section_of(
    part: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]]
) -> Mapping[str, Any] | None:
    """The section that a key holds; None where it holds something else."""
    for candidate in (part, *part.get("anyOf", ())):
        if "$ref" in candidate:
            return sections[candidate["$ref"].rpartition("/")[2]]
    return None


def text() -> str:
    """The schema as a file holds it."""
    return json.dumps(schema(), indent=2) + "\n"
