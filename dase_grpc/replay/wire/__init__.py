"""The wire, as both sides share it: messages, statuses, addresses, limits."""
