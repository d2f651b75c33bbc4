"""Who may call, and how that is proved."""
