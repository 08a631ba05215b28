"""Tests that share one pair of engines, in the order of their files: the last restarts them."""
