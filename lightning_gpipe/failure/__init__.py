"""One error ends all processes."""
