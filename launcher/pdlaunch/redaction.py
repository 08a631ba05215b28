"""Keeps secrets that processes inherit through the environment out of what is shown."""

from __future__ import annotations

import os
from collections.abc import Mapping

from pdlaunch.recipe import SECRET_NAME

_SHORTEST_SECRET = 6


def redact(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """The text with the values of secret variables replaced by their names."""
    secrets = [
        (value, name)
        for name, value in environ.items()
        # Replacing "1" or "yes" everywhere would hide nothing and garble much.
        if SECRET_NAME.search(name) and len(value) >= _SHORTEST_SECRET
    ]
    for value, name in sorted(secrets, key=lambda pair: -len(pair[0])):
        text = text.replace(value, f"<{name}>")
    return text
