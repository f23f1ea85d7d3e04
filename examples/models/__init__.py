"""The models of the GPipe paper, each an ``nn.Sequential`` that the strategy cuts into stages.

They can be built under ``torch.device("meta")``, too: every module in them initializes what it
holds by ``reset_parameters()``, so each process builds its own layers alone.
"""
