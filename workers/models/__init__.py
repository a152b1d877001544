"""The models, as arithmetic on tensors."""
