"""Kernel backends: native CPU, FlashInfer, and the reference oracle. Knows tensors and page tables only."""
