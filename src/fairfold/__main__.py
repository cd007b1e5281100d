"""``python -m fairfold`` is the command ``fairfold``."""

from fairfold.cli import app

if __name__ == "__main__":
    app()
