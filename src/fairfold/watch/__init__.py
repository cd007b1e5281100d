"""A run as its operator sees it: a page, its figures for Prometheus, and nothing but reading of the run's folder."""
