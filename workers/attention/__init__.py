"""Attention over a paged KV cache, behind two methods (see base.py)."""
