"""Where proposals come from, and which of them are made."""
