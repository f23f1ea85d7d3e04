"""Figures of the paper: Huang et al., GPipe, 2019."""

#: Table 1: stages (0: naive, on one device without re-materialization), L and D, parameters,
#: GB of the model, GB of activations on all devices together. Of devices with 8 GB.
AMOEBANETS = (
    (0, (18, 208), "82M", 1.05, 6.26),
    (1, (18, 416), "318M", 3.8, 3.46),
    (2, (18, 544), "542M", 6.45, 8.11),
    (4, (36, 544), "1.05B", 12.53, 15.21),
    (8, (72, 512), "1.8B", 24.62, 26.24),
)
#: The same, with L alone. Of devices with 16 GB. The paper prints the two memories of the first
#: the other way round: 282.2 million parameters of 12 bytes are 3.15 GiB.
TRANSFORMERS = (
    (0, 3, "282.2M", 3.15, 11.7),
    (1, 13, "785.8M", 8.8, 6.4),
    (8, 103, "5.3B", 59.5, 50.9),
    (32, 415, "21.0B", 235.1, 199.9),
    (128, 1663, "83.9B", 937.9, 796.1),
)

STAGES = 2, 4, 8
MICRO_BATCHES = 1, 4, 32
#: Table 2: throughput by M and K, of K=2 and M=1.
FAST = {
    "AmoebaNet-D (18, 256)": {1: (1, 1.13, 1.38), 4: (1.07, 1.26, 1.72), 32: (1.21, 1.84, 3.48)},
    "Transformer-48": {1: (1, 1.07, 1.3), 4: (1.7, 3.2, 4.8), 32: (1.8, 3.4, 6.3)},
}
#: Table 3: the same for M=32, of K=2, on GPUs without a fast interconnect.
SLOW = {"AmoebaNet-D (18, 256)": (1, 1.7, 2.7), "Transformer-48": (1, 1.8, 3.3)}

#: The most of a step that AmoebaNet's recomputes take.
RECOMPUTE = 0.23
