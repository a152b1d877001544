"""The engine's decisions, pure: integers in, plans out. No asyncio, no I/O, no clock, no logging."""
