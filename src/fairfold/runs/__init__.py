"""Run folders: what a run was asked, what it measured, what it learned."""
