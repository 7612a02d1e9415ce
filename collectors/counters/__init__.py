"""One file a counter rung."""
