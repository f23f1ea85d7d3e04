"""A module as a pipeline: cuts it, takes over the backbone's call, gives the module back."""
