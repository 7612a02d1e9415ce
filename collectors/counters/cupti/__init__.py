"""CUPTI PM sampling: the only counter that resolves a single engine step, read by child processes."""
