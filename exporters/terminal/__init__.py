"""The live terminal screen."""
