"""Baton's tests: they mirror the tree; ``sim`` is the simulator."""
