"""Privacy: secure aggregation, differential privacy with a client-side ledger, and an audit by attacks."""
