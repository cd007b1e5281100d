"""Backends compute client updates: sequentially, in threads, in one program, on a GPU, over several ranks."""
