"""Coverage-guided fuzzing: whatever strangers send, read once by the product and once by something simpler.

A target is a file of `targets` with a function `one(data)` that raises when the two readings differ. `run` has atheris
make the inputs, `keep` chooses those that are worth keeping, `test_replay` plays what is kept without atheris.
"""
