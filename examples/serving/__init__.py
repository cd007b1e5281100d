"""Serving without torch: a loader of exported models."""
