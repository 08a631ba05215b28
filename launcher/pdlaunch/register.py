"""The register of patches in patches/README.md: generated from the patches' own trailers."""

from __future__ import annotations

from pathlib import Path

from pdlaunch.errors import PdError
from pdlaunch.series import Patch

BEGIN = "<!-- register: begin (pdlaunch patch export writes it) -->"
END = "<!-- register: end -->"


def render(patches: tuple[Patch, ...]) -> str:
    """The table, markers included."""
    rows = [
        "| # | patch | changes the protocol | forwarded | retire when |",
        "|---|---|---|---|---|",
        *(_row(number, patch) for number, patch in enumerate(patches, start=1)),
    ]
    return "\n".join([BEGIN, *rows, END])


def replaced(readme: str, patches: tuple[Patch, ...]) -> str:
    """The README with its register brought up to date."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise PdError(
            "the register has lost its markers",
            where="patches/README.md",
            next_step=f"put back the lines {BEGIN} and {END}",
        )
    return before + render(patches) + after


def write(readme: Path, patches: tuple[Patch, ...]) -> None:
    text = readme.read_text(encoding="utf-8")
    if (new := replaced(text, patches)) != text:
        readme.write_text(new, encoding="utf-8")


def _row(number: int, patch: Patch) -> str:
    cells = [
        str(number),
        f"[{patch.subject}]({patch.name})",
        *(_cell(patch, key) for key in ("Wire", "Forwarded", "Retire-When")),
    ]
    return f"| {' | '.join(cells)} |"


def _cell(patch: Patch, key: str) -> str:
    return "; ".join(patch.trailers.get(key, ())).replace("|", "\\|")
