"""Training of the two small models that ship with the package.

    corpus -> tokenizer -> trunk -> sample -> head -> draft -> export -> measure

Each stage reads what the stages before it left in the work directory and can be run alone.
"""
