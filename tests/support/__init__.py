"""Helpers that tests share: settings, small federations and runs, pages, a browser, generated subspaces."""
