"""The parts of a model: small frozen objects that hold weights and are called with tensors."""
