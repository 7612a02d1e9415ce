"""The core: vocabulary, pipe, analysis, physics; the command line joins it with sources and sinks."""
