"""Readers of model files: config.json, quantisation files, GGUF headers."""
