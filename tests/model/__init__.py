"""Crews whose model is behind HTTP: CrewAI's own client, a real connection, a server that sees how it ends."""
