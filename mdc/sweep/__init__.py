"""Many trainings that differ in a few parameters, side by side."""
