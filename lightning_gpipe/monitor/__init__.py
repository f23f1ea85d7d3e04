"""What is shown of a pipeline at work: figures, hints, timelines."""
