"""One file an engine: its recognition rule and its adapter."""
