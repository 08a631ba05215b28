"""YAML documents with a comment each, and the names that clusters accept. Knows no kinds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from pdlaunch.errors import UsageError

# RFC 1035, which Services demand; other kinds allow a digit first.
_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
LONGEST_LABEL = 63
# RFC 1123, for what is only referred to: Secrets, claims.
_SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


@dataclass(frozen=True)
class Document:
    """One YAML document; the comment goes above it, line by line."""

    body: Mapping[str, Any]
    comment: str = ""


class _Dumper(yaml.SafeDumper):
    """Writes a value that occurs twice twice: anchors are for machines."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def dump(documents: Iterable[Document]) -> str:
    """The documents as one YAML stream, the same text for the same documents."""
    return "".join(
        "---\n"
        + "".join(f"# {line}".rstrip() + "\n" for line in document.comment.splitlines())
        # An argument is one line, however long: JSON that is broken over lines is hard to compare.
        + yaml.dump(document.body, Dumper=_Dumper, sort_keys=False, width=100_000)
        for document in documents
    )


def check_label(text: str, where: str, *, longest: int = LONGEST_LABEL) -> str:
    """The text, if it may name an object in a cluster.

    Raises:
        UsageError: it may not.
    """
    if len(text) > longest:
        raise UsageError(
            f"{text} has {len(text)} characters, and names in a cluster get at most {longest} here",
            where=where,
            next_step="name a shorter one",
        )
    if not _LABEL.fullmatch(text):
        raise UsageError(
            f"{text!r} cannot name an object in a cluster: lower-case letters, digits and dashes, "
            "a letter first, no dash last",
            where=where,
            next_step=f"name another with {where}",
        )
    return text


def check_reference(text: str, where: str) -> str:
    """The text, if an object that exists in a cluster may have it as its name.

    Raises:
        UsageError: it may not.
    """
    if not _SUBDOMAIN.fullmatch(text):
        raise UsageError(
            f"{text!r} cannot be the name of an object in a cluster",
            where=where,
            next_step="name it as `kubectl get` shows it",
        )
    return text
