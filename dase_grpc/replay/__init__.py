"""The replay: what it keeps, how it is spoken to, who may speak, its two sides."""
