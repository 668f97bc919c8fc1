"""What comes out: the text, thoughts and calls of an answer, its records and its result."""
