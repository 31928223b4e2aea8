"""One job's run: launch, listen, decide, stop, record."""
