"""Attacks on what the server of a run could see, at the run's level of privacy: ``fairfold audit``."""
