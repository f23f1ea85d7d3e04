"""What ranks do together after a backward."""
