"""Runs git so that no setting of the user, the machine or the folder leaks in or out."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from pdlaunch.errors import PdError

# A config file in the repository itself survives the clean environment below, and so do
# hooks; what would change files or messages is overridden on every command line.
_OVERRIDES = {
    "am.keepcr": "true",
    "am.messageId": "false",
    "am.threeWay": "false",
    "apply.ignoreWhitespace": "no",
    "apply.whitespace": "nowarn",
    "commit.gpgSign": "false",
    "core.attributesFile": os.devnull,
    "core.autocrlf": "false",
    "core.eol": "lf",
    "core.excludesFile": os.devnull,
    "core.fsmonitor": "false",
    "core.hooksPath": os.devnull,
    "core.quotePath": "true",
    "core.safecrlf": "false",
    "gc.auto": "0",
    "i18n.commitEncoding": "UTF-8",
    "i18n.logOutputEncoding": "UTF-8",
    "init.defaultBranch": "patches",
    "mailinfo.scissors": "false",
    "tag.gpgSign": "false",
}


def environment(folder: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The process environment without git's variables and without anybody's git config."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    return {
        **kept,
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_SYSTEM": os.devnull,
        # Without a ceiling, `git apply` in a folder of another repository skips every file
        # outside that repository's index and still exits 0.
        "GIT_CEILING_DIRECTORIES": str(folder.resolve().parent),
        "GIT_TERMINAL_PROMPT": "0",
        "LC_ALL": "C",
        "TZ": "UTC",
        **(extra or {}),
    }


def run(
    folder: Path,
    args: Sequence[str],
    *,
    input_bytes: bytes | None = None,
    extra_env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Runs a git command in a folder; the caller looks at the return code."""
    overrides = [word for item in _OVERRIDES.items() for word in ("-c", "=".join(item))]
    try:
        return subprocess.run(
            ["git", *overrides, *args],
            cwd=folder,
            env=environment(folder, extra_env),
            input=input_bytes,
            stdin=subprocess.DEVNULL if input_bytes is None else None,
            capture_output=True,
            check=False,
        )
    except FileNotFoundError as error:
        raise PdError("git is not installed", next_step="install git, 2.32 or newer") from error


def output(
    folder: Path,
    args: Sequence[str],
    *,
    input_bytes: bytes | None = None,
    extra_env: Mapping[str, str] | None = None,
) -> bytes:
    """A git command's stdout; an error when it fails."""
    result = run(folder, args, input_bytes=input_bytes, extra_env=extra_env)
    if result.returncode:
        raise PdError(f"git {args[0]} failed: {complaint(result)}", where=str(folder))
    return result.stdout


def complaint(result: subprocess.CompletedProcess[bytes]) -> str:
    """What git said, in one short line."""
    text = (result.stderr or result.stdout).decode("utf-8", errors="replace")
    lines = [line for line in text.splitlines() if line.startswith(("error:", "fatal:"))]
    return "; ".join(lines or text.splitlines()[:1])[:300]
