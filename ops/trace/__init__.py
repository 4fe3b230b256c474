"""Reads what processes kept of their spans in a run directory, and shows one request's life. Never writes there."""
