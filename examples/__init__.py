"""Scripts to run and to copy from; ``examples.models`` can be imported from the repository."""
