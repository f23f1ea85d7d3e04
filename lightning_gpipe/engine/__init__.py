"""One rank's micro-batches."""
