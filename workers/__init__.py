"""The GPU side: one process per device. Imports `toka.wire` and nothing else of toka."""
