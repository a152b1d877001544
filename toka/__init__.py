"""toka: an LLM inference engine for throughput. Nothing is imported here, so that `import toka.wire` stays cheap."""
