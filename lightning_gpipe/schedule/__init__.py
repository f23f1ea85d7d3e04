"""What every stage does, in which order: pure data."""
