"""Record: Snapshots to a session file."""
