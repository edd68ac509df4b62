"""Plain values that everything else is told in; imports nothing of this project."""
