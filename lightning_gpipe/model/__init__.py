"""The parts of a module that a pipeline is made of."""
