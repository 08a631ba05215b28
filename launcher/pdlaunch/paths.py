"""Where things live: XDG cache and state folders, and the shipped patches and recipes."""

from __future__ import annotations

import os
from pathlib import Path

from pdlaunch.errors import PdError


def _xdg(variable: str, fallback: str) -> Path:
    value = os.environ.get(variable, "")
    # The XDG base directory specification tells to ignore relative values.
    base = Path(value) if value and Path(value).is_absolute() else Path.home() / fallback
    return base / "pdlaunch"


def cache_dir() -> Path:
    """Downloads, wheels, engine environments and models; safe to delete when nothing runs."""
    return _xdg("XDG_CACHE_HOME", ".cache")


def state_dir() -> Path:
    """Records and logs of deployments."""
    return _xdg("XDG_STATE_HOME", ".local/state")


def _shipped(name: str) -> Path:
    package = Path(__file__).resolve().parent
    for candidate in (package / "_data" / name, package.parents[1] / name):
        if candidate.is_dir():
            return candidate
    raise PdError(
        f"the {name} folder of pdlaunch is missing",
        where=str(package),
        next_step="reinstall pdlaunch: pip install --force-reinstall pdlaunch",
    )


def patches_dir() -> Path:
    """The patch series: the checkout's in a checkout, the wheel's copy else."""
    return _shipped("patches")


def recipes_dir() -> Path:
    """The shipped recipes: the checkout's in a checkout, the wheel's copy else."""
    return _shipped("recipes")
