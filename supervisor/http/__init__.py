"""The HTTP side: the only rooms that know aiohttp."""
