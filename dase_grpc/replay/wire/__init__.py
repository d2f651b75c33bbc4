"""What both sides of the wire share: messages, statuses, addresses, limits."""
