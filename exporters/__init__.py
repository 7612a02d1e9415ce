"""Sinks: what turns Frames into metrics, files and screens."""
