"""Sources of StepSeries."""
