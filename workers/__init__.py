"""The GPU side: one process per device. Imports `toka.wire` and nothing else of toka.

So the two sides can be installed apart, and each reads for itself what both must know: options written `key=value`
(`workers.config`, `toka.options`), and a model folder's config.json (`workers.models`, `toka.model`). These are the
copies that the rule costs; there are no others.
"""
