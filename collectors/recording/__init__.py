"""Replay: a recorded session as a source."""
