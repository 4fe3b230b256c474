"""Load and measurement: ``baton bench`` for any OpenAI-compatible server, and the cost of Baton's own orchestration."""
