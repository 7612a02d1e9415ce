"""gpuidle: how much compute stands idle in an LLM inference node, why, and at what cost."""

__version__ = "0.1.0"
