"""Shared by collectors: bounded HTTP, the exposition text parser."""
