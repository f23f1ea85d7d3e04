"""Process groups, and what is sent over them."""
