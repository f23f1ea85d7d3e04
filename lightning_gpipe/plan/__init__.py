"""Where to cut a backbone, and what it costs."""
