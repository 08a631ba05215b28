"""Scripts that run inside an engine's Python. Never imported by pdlaunch itself."""
