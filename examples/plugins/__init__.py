"""What others can add to fairfold, each in one file."""
