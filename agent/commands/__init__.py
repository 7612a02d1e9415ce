"""Commands: the only place that joins sources, the pipe and sinks."""
