"""Processes with a role: asyncio around the plain objects."""
