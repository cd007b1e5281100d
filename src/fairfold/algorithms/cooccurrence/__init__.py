"""Item co-occurrence: the default algorithm."""
