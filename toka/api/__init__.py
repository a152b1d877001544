"""HTTP in, JSON or server-sent events out. Knows the engine as `toka.request.Server`, and no more of it."""
