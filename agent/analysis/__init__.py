"""What a Snapshot means: rates, phases, the ledger. Pure: no clock, no I/O, no globals."""
