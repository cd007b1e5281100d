"""A Flower app: recommendations learned by devices of every size."""
