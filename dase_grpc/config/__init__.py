"""Settings: what a run is told, declared once and checked once."""
