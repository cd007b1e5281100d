"""How answers come about: in turn, in threads, in one program, on a GPU. None knows an algorithm by name."""
