"""Tests of the small device."""
