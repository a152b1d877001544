"""Real clients, each in an environment of its own (tox.ini): what their users write, against a server of this checkout.

An environment holds the client and pytest, and nothing of the engine: what is imported here is the standard library's,
or the client's.
"""
