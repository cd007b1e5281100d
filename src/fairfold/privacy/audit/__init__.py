"""Audit of a run: attacks on what its server could see at the run's privacy level (``fairfold audit``)."""
