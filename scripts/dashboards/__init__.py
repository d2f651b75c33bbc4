"""The Grafana dashboards as code; scripts/write_dashboards.py writes them as JSON."""
