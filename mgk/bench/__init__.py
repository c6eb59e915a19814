"""What `mgk bench` measures: our operators with H/2 heads against PyTorch's SDPA with H."""
