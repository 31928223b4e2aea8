"""Metrics for Prometheus: ``table`` lists them, ``meters`` counts what happens, ``exposition`` answers a scrape."""
