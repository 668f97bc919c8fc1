"""What is asked: options, prompts, holes to fill and tools, checked and made tokens."""
