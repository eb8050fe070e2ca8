"""Things to move with a mouse in a live notebook; each has a plain function behind it. Imports
nothing."""
