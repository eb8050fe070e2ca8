"""Things to move with a mouse in a live notebook, each with a plain function behind it."""
