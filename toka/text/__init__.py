"""Strings to ids and back: tokenizer, chat template, incremental text, stop strings."""
