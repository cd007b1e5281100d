"""The paper's tables and figures, run again: experiments in TOML, cells run once, results beside the paper's."""
