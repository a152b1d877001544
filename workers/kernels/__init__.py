"""Triton kernels and their launchers. Only workers on a GPU import them, and tests, under Triton's interpreter."""
