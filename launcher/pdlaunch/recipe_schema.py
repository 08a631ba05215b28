"""The JSON Schema of recipes, which editors complete and check from. Pure; never reads recipes."""

from __future__ import annotations

import json
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


def text() -> str:
    """The schema as a file holds it."""
    return json.dumps(schema(), indent=2) + "\n"
