"""Renders plans for people and for other programs to carry out. Pure; never starts anything."""
