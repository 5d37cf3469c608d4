"""Drafters: anything that guesses the next tokens of a row."""
