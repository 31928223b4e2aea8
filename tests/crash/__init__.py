"""The supervisor killed at any instant, and what the next one makes of it."""
