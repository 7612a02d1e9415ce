"""Sources: what reads hardware, engines, processes and files into Snapshots."""
