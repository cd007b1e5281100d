"""The innermost layer: where a coordinate of the full vector lives in a compact one, and the loops over it."""
