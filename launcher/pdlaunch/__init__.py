"""pdlaunch: builds the patched vLLM engine and brings up prefill and decode from a recipe."""

from importlib.metadata import version

__version__ = version("pdlaunch")
