"""The tables of the GPipe paper, computed for this package and set beside the paper's figures.

    python -m examples.paper            # writes docs/paper.md and its plots
    python -m examples.paper --keep     # the same, with the times that were measured before

Most is counted: parameters, what a planner finds that stages hold, and schedules replayed in
simulated time. Devices that sleep in place of computing, and a small model on this machine, are
measured.
"""
