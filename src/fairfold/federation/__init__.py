"""Federated training on one machine: tasks, additive updates, aggregation, scheduling, clients, plan and simulation."""
