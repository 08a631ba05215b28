"""A pytest plugin: the collections that upstream runs after each test skip what is imported.

One over all of torch and vLLM takes half a second, most of the time that a unit test takes.
"""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    # Upstream's cleanup thaws the heap first, for the engine's sake, which freezes its own.
    gc.unfreeze = lambda: None
