"""What server and devices say to each other, and the one law of it: what a device says is a summand."""
