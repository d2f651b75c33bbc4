"""Security: who may call, and how that is proved."""
