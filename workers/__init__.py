"""The GPU side: one process per device. Imports `toka.wire` and nothing else of toka.

So each side reads for itself what both must know: options written `key=value` (`workers.config`, `toka.options`), and a
model folder's JSON files (`workers.models`, `toka.model`). Those copies are the price of the rule.
"""
