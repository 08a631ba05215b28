"""Modules that engines import, with this folder on their path. They import nothing of ours."""
