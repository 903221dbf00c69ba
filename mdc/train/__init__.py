"""Training: the loop, its optimiser and schedule, checkpoints, and tracking."""
