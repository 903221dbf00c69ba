"""Architecture only: no corruption, no loss, no device, no rank."""
