"""Pytrees, micro-batches and memory layouts of tensors."""
